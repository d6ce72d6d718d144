"""Into and out of the regions where each rank computes with its shard of a layer's weights (Megatron's f and g).

Inside a region every rank sees all positions and has its own features. Between regions every rank has all features: of
all positions, which it computes like its neighbours, or, with `sequence_parallel`, of its own run of positions alone
(Korthikanti et al. 2022). Either way as many numbers travel: an all-reduce is a reduce-scatter and an all-gather.

|                          | forward        | backward       |
|--------------------------|----------------|----------------|
| enter                    |                | all-reduce     |
| leave                    | all-reduce     |                |
| enter, sequence-parallel | all-gather     | reduce-scatter |
| leave, sequence-parallel | reduce-scatter | all-gather     |

Several streams travel in one message. One that needs no gradient takes part in the forward pass only and gets no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.parallel.collectives import gather_together, scatter_sums_together, sum_together
from pipeline.parallel.topology import TensorParallel

_Exchange = Callable[[Sequence[Tensor], TensorParallel], list[Tensor]]


def enter_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """Before column-parallel products: each stream over all positions, [B, S, ...]. One that is None stays None."""
    if tp.sequence_parallel:
        return _exchange(tp, gather_together, scatter_sums_together, streams, [True] * len(streams))
    wanted = [stream is not None and stream.requires_grad for stream in streams]
    return _exchange(tp, _as_they_are, sum_together, streams, wanted)


def leave_region(tp: TensorParallel, *streams: Tensor | None) -> tuple[Any, ...]:
    """After row-parallel products: the sums of the ranks' partial results, [B, S, ...] or this rank's positions of it.

    A stream that is None stays None.
    """
    there, back = (scatter_sums_together, gather_together) if tp.sequence_parallel else (sum_together, _as_they_are)
    return _exchange(tp, there, back, streams, [True] * len(streams))


def _as_they_are(tensors: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _exchange(
    tp: TensorParallel,
    there: _Exchange,
    back: _Exchange,
    streams: tuple[Tensor | None, ...],
    wanted: Sequence[bool],
) -> tuple[Any, ...]:
    """Sends the wanted streams `there`, and their gradients `back`, each in one call; leaves the others as they are."""
    chosen = [stream is not None and taken for stream, taken in zip(streams, wanted, strict=True)]
    if tp.size == 1 or not any(chosen):
        return streams
    sent = (stream for stream, taken in zip(streams, chosen, strict=True) if taken)
    results = iter(_Exchanged.apply(tp, there, back, *sent))
    return tuple(next(results) if taken else stream for stream, taken in zip(streams, chosen, strict=True))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        tp: TensorParallel,
        there: _Exchange,
        back: _Exchange,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.back = tp, back
        results = there(tensors, tp)
        needs = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(result for result, needed in zip(results, needs, strict=True) if not needed))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        needs = ctx.needs_input_grad[3:]
        sent = [gradient for gradient, needed in zip(gradients, needs, strict=True) if needed]
        received = iter(ctx.back(sent, ctx.tp))
        return (None, None, None, *(next(received) if needed else None for needed in needs))
