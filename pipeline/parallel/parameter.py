"""Parameters that know how they are split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeline.parallel.collectives import sum_gradient
from pipeline.parallel.sharding import REPLICATED, Partition, local_shape
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
    """`parameter`, or, where several ranks hold the same shard of it, a view whose gradient is summed over them."""
    partition = partition_of(parameter)
    replicas = partition.replicas(tp.size)
    if partition.dim is None or replicas == 1 or not parameter.requires_grad:
        return parameter
    return sum_gradient(parameter, tp.replica_group(replicas))


def named_trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` that train, by name."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
