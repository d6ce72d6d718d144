"""The collectives of tensor parallelism, as differentiable functions (Megatron's f and g).

Several tensors travel in one message: a layer with two streams costs no more collectives than a layer with one.
A tensor that needs no gradient takes part in the forward pass only and gets no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel


def enter_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """Before a column-parallel product: the identity, whose backward pass sums the gradients over the ranks (f).

    A stream that is None stays None.
    """
    return _together(_Enter, tp, streams, lambda stream: stream.requires_grad)


def leave_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """After a row-parallel product: the sum of the ranks' partial results, whose backward pass is the identity (g).

    A stream that is None stays None.
    """
    return _together(_Leave, tp, streams, lambda stream: True)


def _together(
    function: type[torch.autograd.Function],
    tp: TensorParallel,
    streams: tuple[Tensor | None, ...],
    takes_part: Callable[[Tensor], bool],
) -> tuple[Any, ...]:
    """Sends the streams that take part through `function` in one call, and leaves the others as they are."""
    chosen = [stream is not None and takes_part(stream) for stream in streams]
    if tp.size == 1 or not any(chosen):
        return streams
    results = iter(function.apply(tp, *(stream for stream, taken in zip(streams, chosen, strict=True) if taken)))
    return tuple(next(results) if taken else stream for stream, taken in zip(streams, chosen, strict=True))


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


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The sums of `tensors` over `group`, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.tp = tp
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return (None, *all_reduce_together(list(gradients), ctx.tp.group))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        summed = tuple(all_reduce_together(list(tensors), tp.group))
        needs = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(tensor for tensor, needed in zip(summed, needs, strict=True) if not needed))
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        needs = ctx.needs_input_grad[1:]
        return (None, *(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)))


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
