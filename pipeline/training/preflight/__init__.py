"""What is measured on the allocation before a run's first step: in seconds, and all that is wrong is said at once."""
