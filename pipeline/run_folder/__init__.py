"""The folder of a run: its lock, its attempts, its state and its metrics. Loads no torch."""
