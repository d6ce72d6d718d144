"""Gates for tests: random weights, and a threshold that opens as many tokens as a test needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.config.gate import GateFeatures
from pipeline.gating.folder import GateRecord
from pipeline.gating.gate import FittedGate
from pipeline.model.attention import Documents
from pipeline.model.decoder import Decoder

Opens = Literal["never", "sometimes", "always"]


def gate_record(**entries: Any) -> GateRecord:
    """The record of a gate that was never fitted, with some `entries` of its own."""
    some = {
        "request": {},
        "layer": 1,
        "features": "token",
        "bias": 0.0,
        "threshold": 0.0,
        "auc": 1.0,
        "closed_fraction_of_new": 0.0,
        "open_fraction_of_negatives": 0.0,
        "left_out_of_own_text": 0.0,
        "heldout": {},
        "closed_max_abs_logit_difference": 0.0,
    }
    return GateRecord.model_validate(some | entries)


def random_gate(
    model: Decoder,
    tokens: Tensor,
    documents: Documents | None = None,
    *,
    features: GateFeatures = "token+running_mean",
    layer: int | None = None,
    opens: Opens = "sometimes",
) -> FittedGate:
    """A gate at the layer where one is by default.

    "sometimes" opens for about half of `tokens`.
    """
    if layer is None:
        assert model.plan is not None
        layer = model.plan.default_gate_layer
    size = model.spec.widths.hidden_size * (1 + (features != "token"))
    random = torch.Generator().manual_seed(3)
    gate = FittedGate(
        layer=layer,
        features=features,
        mean=0.1 * torch.randn(size, generator=random),
        std=0.5 + torch.rand(size, generator=random),
        weight=torch.randn(size, generator=random),
        bias=0.3,
        threshold={"never": 1e30, "always": -1e30}.get(opens, 0.0),
    )
    if opens != "sometimes":
        return gate
    stream = model.base_stream(tokens, documents=documents, layer=gate.layer)
    scores = gate.scores(stream, documents.ids if documents else None)
    ordered = scores.flatten().sort().values
    middle = ordered[len(ordered) // 4 : -len(ordered) // 4]
    widest = int(middle.diff().argmax())  # no token stands at the threshold
    return replace(gate, threshold=float(middle[widest : widest + 2].mean()))
