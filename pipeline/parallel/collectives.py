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
    """Before column-parallel products: each stream over all positions, [B, S, ...].

    None stays None. A collective over the tensor-parallel group: all its ranks call it together, in
    the forward pass with sequence parallelism, otherwise in the backward pass.
    """
    if tp.sequence_parallel:
        return _exchange(tp, gather_together, scatter_sums_together, streams)
    return _exchange(tp, _as_they_are, sum_together, streams)


def leave_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """After row-parallel products: the sums over the ranks, [B, S, ...].

    With sequence parallelism they are this rank's positions of the sums. None stays None. A
    collective over the tensor-parallel group: all its ranks call it together.
    """
    if tp.sequence_parallel:
        return _exchange(tp, scatter_sums_together, gather_together, streams)
    return _exchange(tp, sum_together, _as_they_are, streams)


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The identity on a replicated parameter; its gradient is summed over the ranks of `group`."""
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
    """The sums of `tensors`, of any shapes, over the ranks, in one all-reduce.

    All ranks of the tensor-parallel group must call it.
    """
    # One message of both streams: at these sizes a collective's latency counts, not its bytes. Each
    # element is summed over the ranks by itself, so its sum does not depend on its neighbours.
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=tp.group)
    sums: list[Tensor] = []
    parts = flat.split([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        sums.append(part.view(tensor.shape))
    return sums


def gather_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """Each rank's positions of `tensors` joined, in one all-gather.

    tensors: [B, S / tp_size, ...] each -> [B, S, ...]. All ranks of the tensor-parallel group must
    call it.
    """
    # NCCL gathers contiguous memory along the first dimension only, and the positions are the
    # second: hence the flat buffers, and `movedim` below.
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gathered = own.new_empty(tp.size * len(own))
    dist.all_gather_single(gathered, own, group=tp.group)
    joined: list[Tensor] = []
    # A row for each rank: its part of the first tensor, of the second, and so on.
    parts = gathered.view(tp.size, -1).split([tensor.numel() for tensor in tensors], dim=1)
    for part, tensor in zip(parts, tensors, strict=True):
        of_ranks = part.unflatten(1, tensor.shape)  # [tp_size, B, S / tp_size, ...]
        joined.append(of_ranks.movedim(0, 1).flatten(1, 2))
    return joined


def scatter_sums_together(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """This rank's positions of the sums of `tensors` over the ranks, in one reduce-scatter.

    tensors: [B, S, ...] each -> [B, S / tp_size, ...]. All ranks of the tensor-parallel group must
    call it.
    """
    # [tp_size, B, S / tp_size, ...]: what each rank is to get lies together.
    of_ranks = [tensor.unflatten(1, (tp.size, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([of_rank.flatten(1) for of_rank in of_ranks], dim=1)
    own = flat.new_empty(flat.shape[1])
    dist.reduce_scatter_single(own, flat.flatten(), group=tp.group)
    sums: list[Tensor] = []
    parts = own.split([of_rank[0].numel() for of_rank in of_ranks])
    for part, of_rank in zip(parts, of_ranks, strict=True):
        sums.append(part.view(of_rank.shape[1:]))
    return sums


def _as_they_are(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _exchange(
    tp: TensorParallel, there: _Exchange, back: _Exchange, streams: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Sends streams `there`, and their gradients `back`, in one call each."""
    if tp.size == 1:
        return streams
    travelling: list[int] = []
    for index, stream in enumerate(streams):
        # A stream without a gradient need not travel where only gradients are exchanged.
        if stream is not None and (stream.requires_grad or there is not _as_they_are):
            travelling.append(index)
    if not travelling:
        return streams
    results = _Exchanged.apply(tp, there, back, *[streams[index] for index in travelling])
    exchanged = list(streams)
    for index, result in zip(travelling, results, strict=True):
        exchanged[index] = result
    return tuple(exchanged)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tp: TensorParallel,
        there: _Exchange,
        back: _Exchange,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Nothing is saved for the backward pass: the gradient of a sum, gather or scatter does not
        # depend on the values.
        ctx.tp = tp
        ctx.back = back
        results = there(tensors, tp)
        # A stream that needs no gradient gets no graph.
        without_gradient: list[Tensor] = []
        for result, needs_gradient in zip(results, ctx.needs_input_grad[3:], strict=True):
            if not needs_gradient:
                without_gradient.append(result)
        ctx.mark_non_differentiable(*without_gradient)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # All ranks have built the same graph, so they agree on which streams take part: the sizes
        # of the collective's messages match.
        needed = [index for index in range(len(gradients)) if ctx.needs_input_grad[3 + index]]
        received = ctx.back([gradients[index] for index in needed], ctx.tp)
        of_inputs: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for index, gradient in zip(needed, received, strict=True):
            of_inputs[3 + index] = gradient
        return tuple(of_inputs)


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
        # The other ranks add exact zeros, so that the sum over the ranks has the term once, with
        # its bits unchanged. Dividing it by the number of ranks would round.
        return tensor.view_as(tensor) if counts else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
