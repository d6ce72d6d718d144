"""A study: runs on one base that differ in method, learning rate and seed, and what they showed."""
