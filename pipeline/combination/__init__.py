"""One base with several expansions beside each other."""
