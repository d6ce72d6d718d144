"""How a tensor is split over the tensor-parallel ranks: `split` and `merge` are exact inverses.

Loading, resuming and converting all use these functions, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """How one tensor is split over `tp_size` ranks.

    `dim` is the dimension that is split (None: replicated). `units` is how many indivisible parts
    that dimension has: attention heads, or single rows. If `units` divides by `tp_size`, each rank
    holds consecutive units; if `tp_size` is a multiple of `units`, `tp_size / units` consecutive
    ranks hold the same unit. A `padded` dimension, the vocabulary, is zero-padded to a multiple of
    `tp_size` instead. Other sizes are refused before a model is built: by `model.spec` for the
    base, by `scale.plan` for the expansion.

    A tensor of all experts of a mixture, [experts, ...], may also be split over the `expert_size`
    ranks that share them: this rank holds the consecutive experts of place `expert_rank`. Such a
    tensor is frozen, and read from the base at every layout, so that `merge` never sees one.
    """

    dim: int | None = None
    units: int = 1
    padded: bool = False
    expert_rank: int = 0
    expert_size: int = 1

    def replicas(self, tp_size: int) -> int:
        """How many ranks hold the same shard."""
        if self.dim is None:
            return tp_size
        if self.padded:
            return 1
        return max(1, tp_size // self.units)

    def bounds(self, size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """The shard of `tp_rank`: its first index along `dim` and the one past its last.

        In a padded dimension both may exceed `size`; the rest is zero.
        """
        if self.padded:
            length = -(-size // tp_size)
            return tp_rank * length, (tp_rank + 1) * length
        # Whole units a rank: at least one, also where several ranks share it.
        length = size // self.units * max(1, self.units // tp_size)
        first = tp_rank // self.replicas(tp_size) * length
        return first, first + length

    def experts(self, count: int) -> tuple[int, int]:
        """Of `count` experts, the first one that this rank holds and the one past its last."""
        held = count // self.expert_size
        return self.expert_rank * held, (self.expert_rank + 1) * held


REPLICATED = Partition()
VOCABULARY = Partition(dim=0, padded=True)


def local_shape(shape: Sequence[int], partition: Partition, tp_size: int) -> tuple[int, ...]:
    """The shape of one rank's shard of a tensor of `shape`."""
    local = list(shape)
    if partition.expert_size > 1:
        local[0] //= partition.expert_size
    if partition.dim is not None:
        _, local[partition.dim] = partition.bounds(local[partition.dim], 0, tp_size)
    return tuple(local)


def split(full: Tensor, partition: Partition, tp_rank: int, tp_size: int) -> Tensor:
    """The shard of `full` that `tp_rank` holds."""
    if partition.expert_size > 1:
        full = full[slice(*partition.experts(len(full)))]
    if partition.dim is None or tp_size == 1:
        return full
    size = full.shape[partition.dim]
    start, stop = partition.bounds(size, tp_rank, tp_size)
    # In a padded dimension both may lie beyond the tensor.
    held_start = min(start, size)
    held_stop = min(stop, size)
    shard = full.narrow(partition.dim, held_start, held_stop - held_start)
    if stop <= size:
        return shard
    padding = list(full.shape)
    padding[partition.dim] = (stop - start) - shard.shape[partition.dim]
    return torch.cat([shard, full.new_zeros(padding)], dim=partition.dim)


def merge(shards: Sequence[Tensor], partition: Partition, size: int) -> Tensor:
    """The whole tensor from all ranks' shards, in rank order; `size` is the unpadded length of the
    split dimension."""
    if partition.dim is None or len(shards) == 1:
        return shards[0]
    # Of ranks that hold the same unit, the first one's copy; the copies are equal.
    step = partition.replicas(len(shards))
    return torch.cat(list(shards[::step]), dim=partition.dim).narrow(partition.dim, 0, size)


Rows = tuple[int, int]
"""The first row and the one past the last, counted within a shard."""


class StoredTensor(Protocol):
    """The type of `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, key: slice | tuple[slice, slice]) -> Tensor: ...


def read_shard(
    stored: StoredTensor, partition: Partition, tp_rank: int, tp_size: int, rows: Rows | None = None
) -> Tensor:
    """The shard of `stored` that `tp_rank` holds, as `split` gives it, or `rows` of it; reads
    nothing else."""
    shape = stored.get_shape()
    if rows is None:
        rows = (0, local_shape(shape, partition, tp_size)[0])
    first, stop = rows
    if partition.dim == 1:
        left, right = partition.bounds(shape[1], tp_rank, tp_size)
        return stored[first:stop, left:right]
    if partition.dim is not None:
        above, _ = partition.bounds(shape[0], tp_rank, tp_size)
        first += above
        stop += above
    held = stored[min(first, shape[0]) : min(stop, shape[0])]
    missing = (stop - first) - len(held)
    if missing > 0:
        # A padded vocabulary: the last ranks hold rows beyond the stored ones.
        held = torch.cat([held, held.new_zeros(missing, *shape[1:])])
    return held
