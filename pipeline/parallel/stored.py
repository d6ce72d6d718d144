"""Reading what a rank holds of a tensor that lies whole on the disk, and no more of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipeline.parallel.sharding import Partition, local_shape

Rows = tuple[int, int]
"""The first row and the one past the last, counted within a shard."""


class StoredTensor(Protocol):
    """What `safe_open(...).get_slice` gives: the shape without reading, and any slice."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, key: slice | tuple[slice, slice]) -> Tensor: ...


def read_shard(
    stored: StoredTensor, partition: Partition, tp_rank: int, tp_size: int, rows: Rows | None = None
) -> Tensor:
    """The shard of `stored` that `tp_rank` holds, or some of its rows; equal to those rows of `sharding.split`."""
    shape = stored.get_shape()
    first, stop = rows or (0, local_shape(shape, partition, tp_size)[0])
    if partition.dim == 1:
        left, right = partition.bounds(shape[1], tp_rank, tp_size)
        return stored[first:stop, left:right]
    above = 0 if partition.dim is None else partition.bounds(shape[0], tp_rank, tp_size)[0]
    first, stop = above + first, above + stop
    held = stored[min(first, shape[0]) : min(stop, shape[0])]
    if missing := (stop - first) - len(held):
        held = torch.cat([held, held.new_zeros(missing, *shape[1:])])  # a padded vocabulary
    return held
