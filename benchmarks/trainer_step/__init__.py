"""The benchmark of whole training steps beside other trainers: `python -m benchmarks.trainer_step`."""
