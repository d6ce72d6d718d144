"""One decoder layer on two streams, with sequential or parallel residual."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.model.attention import Attention, Context
from pipeline.model.ffn import FeedForward
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.norm import WidenedNorm
from pipeline.scale.plan import ExpansionPlan


def widened_norm(spec: DecoderSpec, plan: ExpansionPlan | None, tp: TensorParallel) -> WidenedNorm:
    """The norm over both residual streams of this decoder."""
    return WidenedNorm(
        spec.norm,
        spec.widths.hidden_size,
        plan.expansion.hidden_size if plan else None,
        eps=spec.norm_eps,
        statistics=plan.norm if plan else "separate",
        normed_size=spec.normed_size,
        tp=tp,
    )


class DecoderLayer(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes.

    `masked` leaves out whatever was put between the base and its own result: every W12, the adapters, and the whole
    layer where it is `added`, that is, none of the base's. Sequence-parallel ranks have their own positions of both
    streams: [B, S / tp_size, ...].
    """

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, added: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.added = added
        self.parallel_residual = spec.parallel_residual
        self.attention_norm = widened_norm(spec, plan, tp)
        self.attention = Attention(spec, plan, layer, tp=tp)
        self.ffn_norm = widened_norm(spec, plan, tp)
        self.ffn = FeedForward(spec, plan, layer, tp=tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, masked: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if masked and self.added:
            return x, x_up
        attended = self.attention(*self.attention_norm(x, x_up), context, masked=masked)
        if self.parallel_residual:
            fed = self.ffn(*self.ffn_norm(x, x_up), masked=masked)
            return _add(_add((x, x_up), attended), fed)
        x, x_up = _add((x, x_up), attended)
        return _add((x, x_up), self.ffn(*self.ffn_norm(x, x_up), masked=masked))


def _add(streams: tuple[Tensor, Tensor | None], change: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    (x, x_up), (y, y_up) = streams, change
    return x + y, None if x_up is None or y_up is None else x_up + y_up
