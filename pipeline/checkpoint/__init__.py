"""What a checkpoint is on the disk, and reading any of them back, whatever layout wrote it."""
