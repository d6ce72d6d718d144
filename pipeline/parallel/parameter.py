"""Parameters that know how they are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.parallel.collectives import sum_gradient
from pipeline.parallel.sharding import REPLICATED, Partition, local_shape
from pipeline.parallel.stored import Rows
from pipeline.parallel.topology import TensorParallel


def sharded_parameter(shape: Sequence[int], partition: Partition, tp: TensorParallel) -> nn.Parameter:
    """An empty parameter holding this rank's shard of a tensor of `shape`.

    It carries `tp_partition` (ZeRO-3 puts a method of its own called `partition` on every parameter) and `full_shape`.
    DeepSpeed counts a parameter in the gradient norm on rank 0, or wherever `tensor_model_parallel` is set: it is set
    on exactly one holder of every shard, so that each counts once.
    """
    parameter = nn.Parameter(torch.empty(local_shape(shape, partition, tp.size)))
    parameter.tp_partition = partition  # type: ignore[attr-defined]
    parameter.full_shape = tuple(shape)  # type: ignore[attr-defined]
    first_holder = partition.dim is not None and tp.rank % partition.replicas(tp.size) == 0
    parameter.tensor_model_parallel = first_holder  # type: ignore[attr-defined]
    return parameter


def partition_of(parameter: Tensor) -> Partition:
    """How `parameter` is split; a parameter that nobody split is held whole by every rank."""
    partition: Partition = getattr(parameter, "tp_partition", REPLICATED)
    return partition


def full_shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor that `parameter` is a shard of."""
    return tuple(getattr(parameter, "full_shape", parameter.shape))


def shared_by_neighbours(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """`parameter`, or, where several ranks hold the same shard of it (or the whole), a view whose gradient is summed
    over them: for a parameter that sees a part of the work on each."""
    replicas = partition_of(parameter).replicas(tp.size)
    if replicas == 1 or not parameter.requires_grad:
        return parameter
    return sum_gradient(parameter, tp.replica_group(replicas))


def used_between_regions(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """`parameter`, which every rank holds whole. Where each applies it to its own positions alone, as a norm does, its
    gradient is summed over the ranks (see `parallel.regions`)."""
    if not tp.sequence_parallel or not parameter.requires_grad:
        return parameter
    return sum_gradient(parameter, tp.group)


def named_trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` that train, by name."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def held_values(parameter: Tensor) -> Tensor:
    """What this rank holds of `parameter`: the shard, or, once ZeRO-3 has partitioned that, a flat piece of it."""
    values: Tensor = getattr(parameter, "ds_tensor", parameter)
    return values


@torch.no_grad()
def fill(parameter: Tensor, tp: TensorParallel, read: Callable[[Rows], Tensor]) -> None:
    """Sets what this rank holds of `parameter`. `read` gives rows of its shard: no more are asked for than that takes.

    ZeRO-3 flattens a shard and cuts it into equal pieces, one a data-parallel rank; the last ones end in padding.
    """
    shape = local_shape(full_shape_of(parameter), partition_of(parameter), tp.size)
    held = held_values(parameter)
    if held is parameter:
        held.copy_(read((0, shape[0])))
        return
    row = prod(shape[1:])
    first = min(prod(shape), held.numel() * dist.get_rank(parameter.ds_process_group))  # type: ignore[attr-defined]
    stop = min(prod(shape), first + held.numel())
    held[stop - first :].zero_()
    if first < stop:
        rows = first // row, -(-stop // row)
        held[: stop - first].copy_(read(rows).flatten()[first - rows[0] * row : stop - rows[0] * row])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made in the block are of type `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
