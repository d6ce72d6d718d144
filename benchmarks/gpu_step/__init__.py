"""The benchmark of one training step: `python -m benchmarks.gpu_step`."""
