"""Tensor parallelism: which rank holds which part of a tensor, and the collectives between them.

Knows nothing of SCALE.
"""
