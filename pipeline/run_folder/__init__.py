"""The folder of a run: its lock, attempts, status and metrics. Imports no torch."""
