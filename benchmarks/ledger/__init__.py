"""What a training step reads, writes and computes on a GPU, counted without one."""
