"""Tokenization of a corpus: units of work, the queue and the workers that take them, and the
held-out documents."""
