"""The feed-forward block on two streams: gated in the Llama family, plain in GPT-NeoX."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.spec import DecoderSpec
from pipeline.parallel.regions import enter_region, leave_region
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.linear import Part, WidenedColumnLinear, WidenedRowLinear
from pipeline.scale.plan import ExpansionPlan

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.activation = ACTIVATIONS[spec.activation]
        width, added = spec.widths, plan.expansion if plan else None
        hidden = Part(width.hidden_size, 1)
        inner = Part(width.intermediate_size, width.intermediate_size)
        hidden_up = Part(added.hidden_size, 1) if added else None
        inner_up = Part(added.intermediate_size, added.intermediate_size) if added else None
        into = (hidden_up, inner_up) if hidden_up and inner_up else None
        back = (inner_up, hidden_up) if hidden_up and inner_up else None
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "ffn")

        def column() -> WidenedColumnLinear:
            return WidenedColumnLinear((hidden, inner), into, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)

        self.gate = column() if spec.gated_ffn else None
        self.up = column()
        self.down = WidenedRowLinear((inner, hidden), back, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool = False) -> tuple[Tensor, Tensor | None]:
        x, x_up = enter_region(self.tp, x, x_up)
        inner, inner_up = self.up(x, x_up, masked=masked)
        gate, gate_up = (None, None) if self.gate is None else self.gate(x, x_up, masked=masked)
        inner = self._activate(inner, gate)
        inner_up = None if inner_up is None else self._activate(inner_up, gate_up)
        return leave_region(self.tp, *self.down(inner, inner_up, masked=masked))

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        return self.activation(inner) if gate is None else self.activation(gate) * inner
