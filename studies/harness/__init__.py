"""Runs a study: many runs on one base that differ in method, learning rate and seed."""
