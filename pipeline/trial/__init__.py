"""A small copy of a run, to go through every stage of its job in minutes (scale-cpt try)."""
