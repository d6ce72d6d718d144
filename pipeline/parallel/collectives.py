"""The collectives of tensor parallelism.

Layers compute with their shards in regions, between `enter_region` and `leave_region` (Megatron's f
and g). Inside, every rank sees all positions and has its own features. Between regions every rank
has all features: of all positions, or, with `sequence_parallel`, of its own run of positions
(Korthikanti et al. 2022). The traffic is the same, since an all-reduce is a reduce-scatter and an
all-gather:

    |                          | forward        | backward       |
    |--------------------------|----------------|----------------|
    | enter                    |                | all-reduce     |
    | leave                    | all-reduce     |                |
    | enter, sequence-parallel | all-gather     | reduce-scatter |
    | leave, sequence-parallel | reduce-scatter | all-gather     |

Several tensors travel in one message: a layer with two streams needs no more collectives than a
layer with one. A stream that needs no gradient takes part in the forward pass only and gets no
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel

_Exchange = Callable[[Sequence[Tensor], TensorParallel], list[Tensor]]


def enter_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """Before column-parallel products: each stream over all positions, [B, S, ...]; None stays
    None."""
    if tp.sequence_parallel:
        return _exchange(tp, gather_together, scatter_sums_together, streams)
    return _exchange(tp, _as_they_are, sum_together, streams)


def leave_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """After row-parallel products: the sums over the ranks, [B, S, ...], or this rank's positions
    of them; None stays None."""
    if tp.sequence_parallel:
        return _exchange(tp, scatter_sums_together, gather_together, streams)
    return _exchange(tp, sum_together, _as_they_are, streams)


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The identity on a replicated parameter of any shape; its gradient is summed over the ranks of
    `group`."""
    summed: Tensor = _SumGradient.apply(tensor, group)
    return summed


def counted_once(tensor: Tensor, tp: TensorParallel) -> Tensor:
    """A replicated term, of any shape, of a sum over the ranks: zero on all ranks but rank 0.

    Its gradient is the same on every rank, so that the copies stay equal.
    """
    if tp.size == 1:
        return tensor
    once: Tensor = _CountedOnce.apply(tensor, tp.rank == 0)
    return once


def sum_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """The sums of `tensors`, of any shapes, over the ranks, in one all-reduce."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=tp.group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def gather_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """Each rank's positions of `tensors`, [B, S / tp_size, ...], joined to [B, S, ...] in one
    all-gather."""
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gathered = own.new_empty(tp.size * len(own))
    dist.all_gather_single(gathered, own, group=tp.group)
    parts = gathered.view(tp.size, -1).split([tensor.numel() for tensor in tensors], dim=1)
    return [
        part.unflatten(1, tensor.shape).movedim(0, 1).flatten(1, 2)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def scatter_sums_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """The sums of `tensors`, [B, S, ...], over the ranks: this rank's positions [B, S / tp_size,
    ...], in one reduce-scatter."""
    runs = [tensor.unflatten(1, (tp.size, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([run.flatten(1) for run in runs], dim=1)
    own = flat.new_empty(flat.shape[1])
    dist.reduce_scatter_single(own, flat.flatten(), group=tp.group)
    parts = own.split([run[0].numel() for run in runs])
    return [part.view(run.shape[1:]) for part, run in zip(parts, runs, strict=True)]


def _as_they_are(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _exchange(
    tp: TensorParallel, there: _Exchange, back: _Exchange, streams: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Sends streams `there`, and their gradients `back`, in one call each. Some need to travel in
    neither direction."""
    travels = [
        stream is not None and (stream.requires_grad or there is not _as_they_are)
        for stream in streams
    ]
    if tp.size == 1 or not any(travels):
        return streams
    sent = (stream for stream, travelling in zip(streams, travels, strict=True) if travelling)
    results = iter(_Exchanged.apply(tp, there, back, *sent))
    return tuple(
        next(results) if travelling else stream
        for stream, travelling in zip(streams, travels, strict=True)
    )


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tp: TensorParallel,
        there: _Exchange,
        back: _Exchange,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.back = tp, back
        results = there(tensors, tp)
        needs = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, needs, strict=True) if not needed)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        sent = [gradient for gradient, needed in zip(gradients, needs, strict=True) if needed]
        received = iter(ctx.back(sent, ctx.tp))
        return (None, None, None, *(next(received) if needed else None for needed in needs))


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same tensor to another branch of the graph.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool) -> Tensor:
        return tensor.view_as(tensor) if counts else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
