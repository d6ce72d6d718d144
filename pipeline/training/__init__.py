"""The training loop and what surrounds it; the only package that imports DeepSpeed."""
