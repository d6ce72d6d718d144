"""The training loop and what surrounds it; the only room that imports DeepSpeed."""
