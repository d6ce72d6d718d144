"""How a tensor is split over the tensor-parallel ranks: `split` and `merge` are exact inverses.

Loading, resuming and converting all use these functions, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from pipeline.parallel.collectives import sum_gradient
from pipeline.parallel.topology import TensorParallel

if TYPE_CHECKING:
    from pipeline.parallel.quantized import Quantization


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


def sharded_parameter(
    shape: Sequence[int], partition: Partition, tp: TensorParallel
) -> nn.Parameter:
    """An empty parameter holding this rank's shard of a tensor of `shape`.

    It carries `tp_partition` (ZeRO-3 sets an attribute `partition`) and `full_shape`. DeepSpeed
    counts a parameter in the gradient norm on rank 0, or wherever `tensor_model_parallel` is set:
    on one holder of every shard.
    """
    parameter = nn.Parameter(torch.empty(local_shape(shape, partition, tp.size)))
    parameter.tp_partition = partition  # type: ignore[attr-defined]
    parameter.full_shape = tuple(shape)  # type: ignore[attr-defined]
    # Megatron's attribute. Without it DeepSpeed takes a shard for a replicated parameter and counts
    # that of rank 0 alone: a wrong norm and wrong clipping, without an error.
    first_holder = partition.dim is not None and tp.rank % partition.replicas(tp.size) == 0
    parameter.tensor_model_parallel = first_holder  # type: ignore[attr-defined]
    return parameter


def partition_of(parameter: Tensor) -> Partition:
    """How `parameter` is split; without `tp_partition` it is replicated."""
    partition: Partition = getattr(parameter, "tp_partition", REPLICATED)
    return partition


def full_shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, of which this rank may hold a part or nothing."""
    # ZeRO-3 sets `ds_shape`, also of modules that are not ours and do not set `full_shape`.
    held = getattr(parameter, "ds_shape", parameter.shape)
    return tuple(getattr(parameter, "full_shape", held))


def quantization_of(parameter: Tensor) -> Quantization | None:
    """In how few bits the frozen `parameter` is stored; None for an ordinary one."""
    return getattr(parameter, "quantization", None)


def sum_gradient_over_replicas(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """`parameter`, of any shape; if several ranks hold the same shard, a view whose gradient is
    summed over them.

    For a parameter that each of these ranks applies to a different part of the work.
    """
    replicas = partition_of(parameter).replicas(tp.size)
    if replicas == 1 or not parameter.requires_grad:
        return parameter
    return sum_gradient(parameter, tp.replica_group(replicas))


def used_between_regions(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """The replicated `parameter`, of any shape, with its gradient summed over the ranks under
    sequence parallelism.

    A norm or map between regions then sees one rank's positions only.
    """
    if not tp.sequence_parallel or not parameter.requires_grad:
        return parameter
    return sum_gradient(parameter, tp.group)


def named_trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` that train, by name."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


@dataclass(frozen=True)
class ZeroPartition:
    """The part of a flattened shard that this data-parallel rank holds under ZeRO-3.

    Every parameter has one as `zero_partition`, set by `pipeline.training`.

    Attributes:
        values: the part. It has the same length on all ranks, so on the last ranks it ends in
            padding, or consists of it.
        first: the index of its first element in the flattened shard.
        length: the number of elements without padding.
    """

    values: Tensor
    first: int
    length: int


def zero_partition_of(parameter: Tensor) -> ZeroPartition | None:
    """This rank's part of the shard; None if it holds the whole shard."""
    partition: ZeroPartition | None = getattr(parameter, "zero_partition", None)
    return partition


@dataclass(frozen=True)
class OptimizerShard:
    """The run of a parameter's flattened shard that this rank's optimizer updates.

    Attributes:
        parameter: the parameter.
        flat: the fp32 weights of many parameters in a row; each moment has the same layout.
        start: where this shard begins in `flat`.
        first, length: which elements of the parameter's flattened shard it is.
    """

    parameter: nn.Parameter
    flat: Tensor
    start: int
    first: int
    length: int

    def within(self, flat: Tensor) -> Tensor:
        """This rank's run of `flat`, or of a moment with its layout."""
        return flat.detach().narrow(0, self.start, self.length)


def held_values(parameter: Tensor) -> Tensor:
    """What this rank holds of `parameter`: its shard, or under ZeRO-3 a flat part of it."""
    partition = zero_partition_of(parameter)
    if partition is None:
        return parameter
    return partition.values


_PARTS_OF_EXPERTS = 8


@torch.no_grad()
def fill(parameter: Tensor, tp: TensorParallel, read: Callable[[Rows], Tensor]) -> None:
    """Sets what this rank holds of `parameter`. `read` returns rows of the shard; only the needed
    rows are read.

    A parameter of all experts of a layer [experts, out, in] is read in parts, so that it is never
    held twice.
    """
    shape = local_shape(full_shape_of(parameter), partition_of(parameter), tp.size)
    held = zero_partition_of(parameter)
    if held is None:
        rows_at_once = shape[0]
        if len(shape) == 3:
            # All experts of a layer may be tens of GB, many times any other tensor of the model.
            rows_at_once = -(-shape[0] // _PARTS_OF_EXPERTS)  # rounded up
        for first in range(0, shape[0], rows_at_once):
            stop = min(first + rows_at_once, shape[0])
            parameter[first:stop].copy_(read((first, stop)))
        return

    held.values[held.length :].zero_()
    if held.length == 0:
        return
    # ZeRO-3 cuts the flattened shard anywhere: read the rows that contain the part, then cut it
    # out.
    row_size = prod(shape[1:])
    first_row = held.first // row_size
    stop_row = -(-(held.first + held.length) // row_size)  # rounded up
    values = read((first_row, stop_row)).flatten()
    offset = held.first - first_row * row_size
    held.values[: held.length].copy_(values[offset : offset + held.length])


def fill_whole(parameter: Tensor, tp: TensorParallel, whole: Tensor) -> None:
    """Sets what this rank holds of `parameter` to its part of the unsharded values `whole`."""
    shard = split(whole, partition_of(parameter), tp.rank, tp.size)
    fill(parameter, tp, lambda rows: shard[slice(*rows)])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made in the block are of type `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
