"""What a run will hold, send and compute, before there is a GPU: the run's real graph on tensors without data.

Memory of activations, messages of tensor parallelism and FLOPs are counted on the graph that autograd builds; what
DeepSpeed holds and sends is stated as arithmetic, and tested against real runs.
"""
