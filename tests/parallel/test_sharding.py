"""Splitting and merging are exact inverses, for any tensor, partition and number of ranks that fit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.parallel.parameters import full_shape_of, partition_of, sharded_parameter
from pipeline.parallel.sharding import REPLICATED, Partition, local_shape, merge, split
from pipeline.parallel.topology import TensorParallel


@st.composite
def split_tensors(draw):
    """A tensor of distinct numbers, a partition of it, and a number of ranks on which it lies."""
    tp_size = draw(st.integers(1, 12))
    dims = draw(st.integers(1, 3))
    dim = draw(st.none() | st.integers(0, dims - 1))
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    partition = REPLICATED
    if dim is not None:
        padded = draw(st.booleans())
        if padded:
            shape[dim] = draw(st.integers(1, 30))
            partition = Partition(dim=dim, padded=True)
        else:
            divisors = [units for units in range(1, tp_size + 1) if tp_size % units == 0]
            units = draw(
                st.sampled_from(divisors) | st.integers(1, 4).map(lambda runs: runs * tp_size)
            )
            shape[dim] = units * draw(st.integers(1, 4))
            partition = Partition(dim=dim, units=units)
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    return tensor, partition, tp_size


@given(split_tensors())
def test_merge_undoes_split_and_neighbours_hold_the_replicas(case):
    tensor, partition, tp_size = case
    shards = [split(tensor, partition, rank, tp_size) for rank in range(tp_size)]
    size = 0 if partition.dim is None else tensor.shape[partition.dim]
    replicas = partition.replicas(tp_size)
    assert torch.equal(merge(shards, partition, size), tensor)
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == local_shape(tensor.shape, partition, tp_size)
        assert torch.equal(shard, shards[rank - rank % replicas])

    # The tensor's numbers are 1, 2, 3...: each is held by as many ranks, and 0 is padding.
    held = torch.cat([shard.flatten() for shard in shards])
    counts = torch.bincount(held, minlength=tensor.numel() + 1)
    assert (counts[1:] == replicas).all()
    assert counts[0] == 0 or partition.padded


@given(split_tensors())
def test_a_parameter_is_marked_once_for_every_shard(case):
    """DeepSpeed counts a marked parameter, or else rank 0's, in the gradient norm: each number must
    count once."""
    tensor, partition, tp_size = case
    counted = 0
    for rank in range(tp_size):
        parameter = sharded_parameter(
            tuple(tensor.shape), partition, TensorParallel(rank=rank, size=tp_size)
        )
        assert partition_of(parameter) == partition
        assert full_shape_of(parameter) == tuple(tensor.shape)
        if parameter.tensor_model_parallel or rank == 0:
            counted += int((split(tensor, partition, rank, tp_size) != 0).sum())
    assert counted == tensor.numel()
