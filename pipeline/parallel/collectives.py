"""The collectives of tensor parallelism.

Several tensors travel in one message: a layer with two streams costs no more collectives than a layer with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel

# Since torch 2.13 by the first names; before, by the second.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The identity on a parameter that several ranks hold; its gradient is summed over them."""
    summed: Tensor = _SumGradient.apply(tensor, group)
    return summed


def counted_once(tensor: Tensor, tp: TensorParallel) -> Tensor:
    """A term of a sum over the ranks that each of them holds whole: it enters on the first rank alone.

    The gradient reaches it on every rank, so that the holders stay equal.
    """
    if tp.size == 1:
        return tensor
    once: Tensor = _CountedOnce.apply(tensor, tp.rank == 0)
    return once


def sum_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """The sums of `tensors` over the ranks, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=tp.group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def gather_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """The whole of `tensors`, of which each rank has its run of positions, in one message: [B, S / tp_size, ...] each,
    results [B, S, ...]."""
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gathered = own.new_empty(tp.size * len(own))
    _all_gather(gathered, own, group=tp.group)
    parts = gathered.view(tp.size, -1).split([tensor.numel() for tensor in tensors], dim=1)
    return [
        part.unflatten(1, tensor.shape).movedim(0, 1).flatten(1, 2) for part, tensor in zip(parts, tensors, strict=True)
    ]


def scatter_sums_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """This rank's run of positions of the sums of `tensors` over the ranks, in one message: [B, S, ...] each, results
    [B, S / tp_size, ...]."""
    runs = [tensor.unflatten(1, (tp.size, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([run.flatten(1) for run in runs], dim=1)
    own = flat.new_empty(flat.shape[1])
    _reduce_scatter(own, flat.flatten(), group=tp.group)
    parts = own.split([run[0].numel() for run in runs])
    return [part.view(run.shape[1:]) for part, run in zip(parts, runs, strict=True)]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        # A copy: what autograd hands over may belong to another branch of the graph as well.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool) -> Tensor:  # noqa: ANN401
        return tensor.view_as(tensor) if counts else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None
