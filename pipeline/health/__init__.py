"""Checks of the allocation before the first step, and a watchdog over the ranks."""
