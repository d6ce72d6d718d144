"""The parts of `python -m benchmarks.gpu`, which proves the project on a machine with one GPU."""
