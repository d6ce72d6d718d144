"""The output projection beside a hosted base: logits = f(W_out x + b + W_out^up x_up).

f is what the base does to the products of its output map: a constant factor, soft-capping, or
nothing. The added logits pass through it too, as one wider output map would have it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.model.open_weights import OwnRowOfToken
from pipeline.model.output import OutputProjection
from pipeline.parallel.topology import SINGLE


class HostedOutput(OutputProjection):
    """The output projection whose W_out and bias are those of the base's own module."""

    def __init__(
        self,
        spec: HostedSpec,
        expansion_size: int | None,
        base_map: nn.Module,
        own_row_of: OwnRowOfToken | None,
    ) -> None:
        super().__init__(
            spec.vocab_size,
            spec.widths.hidden_size,
            expansion_size,
            own_row_of=own_row_of,
            threshold=0.0,
            softcap=spec.output_softcap,
            tp=SINGLE,
        )
        self.scale = spec.logit_scale
        self.logit_factor = self.scale.factor
        if self.scale.divides:
            self.logit_factor = 1 / self.scale.factor
        self.base = base_map.get_parameter("weight")
        self.bias: nn.Parameter | None = None
        if spec.output_map_bias:
            self.bias = base_map.get_parameter("bias")

    def slopes(self, logits: Tensor) -> Tensor | None:
        slopes = super().slopes(logits)
        if self.logit_factor == 1.0:
            return slopes
        if slopes is None:
            return logits.new_full((), self.logit_factor)
        return slopes.mul_(self.logit_factor)

    def _base_product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)

    def reference_logits(self, x: Tensor) -> Tensor:
        return self._capped_(self._base_logits(x, self.base))

    def _capped_(self, z: Tensor) -> Tensor:
        if self.scale.factor != 1.0:
            if self.scale.divides:
                z.div_(self.scale.factor)
            else:
                z.mul_(self.scale.factor)
        return super()._capped_(z)
