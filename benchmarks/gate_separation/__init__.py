"""The benchmark of gates on texts that look alike: `python -m benchmarks.gate_separation`."""
