"""A watchdog over the ranks, and the phases of each."""
