"""What a run will hold, send and compute, estimated without a GPU.

Activation memory, tensor-parallel messages and FLOPs are counted on the run's own graph, with
tensors without data. What DeepSpeed holds and sends is computed by formulas, which tests compare
with real runs.
"""
