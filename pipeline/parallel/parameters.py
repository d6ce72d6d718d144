"""Parameters of which a rank holds a part: its shard under tensor parallelism, and under ZeRO-3 a
partition of that.

How they are made, what they carry, whose gradients are summed, and how they are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.parallel.collectives import sum_gradient
from pipeline.parallel.sharding import REPLICATED, Partition, Rows, local_shape, split
from pipeline.parallel.topology import TensorParallel

if TYPE_CHECKING:
    from pipeline.parallel.quantized import Quantization


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
    if tp.size == 1 or not parameter.requires_grad:
        return parameter
    replicas = partition_of(parameter).replicas(tp.size)
    if replicas == 1:
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
