"""What a checkpoint is on disk, and a reader for checkpoints of any layout."""
