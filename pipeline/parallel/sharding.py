"""How a tensor is split over the tensor-parallel ranks: `split` and `merge` are exact inverses.

Loading, resuming and converting all go through these functions, so that no two of them can disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """How one tensor lies over `tp_size` ranks.

    `dim` is the dimension that is split (None: every rank holds the whole). `units` is how many indivisible parts that
    dimension has: attention heads, or single rows. Where `units` divides by `tp_size` each rank holds its run of units;
    where `tp_size` is a multiple of `units` each unit is held by `tp_size / units` neighbouring ranks. A `padded`
    dimension (the vocabulary) is filled up with zeros to a multiple of `tp_size` instead. Other sizes are refused
    before a model is built: by `model.spec` for the base, by `scale.plan` for what is added.
    """

    dim: int | None = None
    units: int = 1
    padded: bool = False

    def replicas(self, tp_size: int) -> int:
        """How many ranks hold the same shard."""
        if self.dim is None:
            return tp_size
        return 1 if self.padded else max(1, tp_size // self.units)

    def bounds(self, size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """The shard of `tp_rank`: its first index along `dim` and the one past its last.

        In a padded dimension both may lie beyond `size`: what is missing there is zero.
        """
        if self.padded:
            length = -(-size // tp_size)
            return tp_rank * length, (tp_rank + 1) * length
        unit = size // self.units
        if self.units % tp_size == 0:
            per_rank = self.units // tp_size
            return tp_rank * per_rank * unit, (tp_rank + 1) * per_rank * unit
        first = tp_rank // (tp_size // self.units)
        return first * unit, (first + 1) * unit

    def local_size(self, size: int, tp_size: int) -> int:
        """The length of a shard of a dimension of `size`."""
        start, stop = self.bounds(size, 0, tp_size)
        return stop - start


REPLICATED = Partition()


def local_shape(shape: Sequence[int], partition: Partition, tp_size: int) -> tuple[int, ...]:
    """The shape of one rank's shard of a tensor of `shape`."""
    local = list(shape)
    if partition.dim is not None:
        local[partition.dim] = partition.local_size(local[partition.dim], tp_size)
    return tuple(local)


def split(full: Tensor, partition: Partition, tp_rank: int, tp_size: int) -> Tensor:
    """The shard of `full` that `tp_rank` holds; padding is zero."""
    if partition.dim is None or tp_size == 1:
        return full
    size = full.shape[partition.dim]
    start, stop = partition.bounds(size, tp_rank, tp_size)
    shard = full.narrow(partition.dim, min(start, size), max(0, min(stop, size) - min(start, size)))
    if stop <= size:
        return shard
    padding = list(full.shape)
    padding[partition.dim] = (stop - start) - shard.shape[partition.dim]
    return torch.cat([shard, full.new_zeros(padding)], dim=partition.dim)


def merge(shards: Sequence[Tensor], partition: Partition, size: int) -> Tensor:
    """The whole tensor from all ranks' shards, in rank order; `size` is the true length of the split dimension."""
    if partition.dim is None or len(shards) == 1:
        return shards[0]
    step = partition.replicas(len(shards))
    return torch.cat(list(shards[::step]), dim=partition.dim).narrow(partition.dim, 0, size)
