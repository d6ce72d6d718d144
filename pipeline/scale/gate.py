"""What a decoder needs of a gate; `pipeline.gating.gate` has the one that is fitted."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.scale.plan import ExpansionPlan
from pipeline.scale_math import choose_path

__all__ = ["Gate", "choose_path", "deepest_gate_layer"]


class Gate(Protocol):
    """Decides per token, on the exact base stream before `layer`, whether the model may differ from its base."""

    @property
    def layer(self) -> int:
        """The index of the layer before which the base stream is read; the number of layers: after the last."""

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], document_ids: [B, S] -> which tokens are open: bool [B, S]."""


def deepest_gate_layer(plan: ExpansionPlan) -> int:
    """The highest layer before which the model has the exact base stream (the number of layers: after the last).

    Preserve has it everywhere, Route on its preserved path, Adapt up to the first layer with W12.
    """
    if plan.routed:
        return plan.num_layers
    return plan.l_fp
