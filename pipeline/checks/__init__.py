"""The door: what a user brings to a run, checked once. Dry run, stages and preflight share the checks."""
