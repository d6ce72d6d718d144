"""What a user brings to a run, checked once: by a dry run, by the stages, and by the preflight."""
