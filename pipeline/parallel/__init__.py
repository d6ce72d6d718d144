"""Tensor parallelism, independent of SCALE: which rank holds which part of a tensor, and the
collectives."""
