"""Made-up people, what is written of them, and what may be asked: a test of forgetting in which every fact is known."""
