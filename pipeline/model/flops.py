"""How many floating-point operations a training step costs, counted on the graph that autograd really builds.

The model runs forward and backward on the meta device, where nothing is computed. So frozen parts, paths without a
gradient and every method are counted by what they do, not by a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model.decoder import Decoder

_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm")


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations a token, forward and backward, a multiply-add being two."""

    matrix: float
    attention: float

    @property
    def total(self) -> float:
        """Matrix products and attention together."""
        return self.matrix + self.attention


def count_flops(meta_model: Decoder, sequence_length: int) -> FlopsPerToken:
    """Counts one step of `meta_model`, a model built under `torch.device("meta")` with its `requires_grad` set."""
    tokens = torch.zeros(1, sequence_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        total, *_ = meta_model(tokens, tokens)
        total.backward()
    counts = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    matrix = sum(flops for operation, flops in counts.items() if operation in _MATRIX_PRODUCTS)
    return FlopsPerToken(matrix / sequence_length, (sum(counts.values()) - matrix) / sequence_length)
