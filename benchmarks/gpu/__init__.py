"""The parts of `tools/gpu_check.py`, which proves the project on a machine with one GPU."""
