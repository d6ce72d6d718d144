"""The files of a checkpoint, and a reader for checkpoints of any layout."""
