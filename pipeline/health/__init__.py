"""What keeps a job alive: checks before the first step, and a watchdog over the ranks."""
