"""The gate: a logistic regression on the base stream that decides whether a token is of new text.

A closed token takes no W12 and no Z^up: it gets the base's result. The gate reads the stream where
no trained block has changed it, so its decisions do not depend on what was trained. It is fitted
after training, and used in inference only (docs/gate.md).

Ids that old text hardly ever has are open whatever their score. So are the new tokens of an
extended vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeline.config.gate import GateFeatures
from pipeline.scale_math import gate_scores, running_mean, stream_over_rms

NUMBERS = ("layer", "features", "bias", "threshold")
"""The fields of a gate that are no tensors; gate.json and an export's config.json hold them."""


@dataclass(frozen=True)
class FittedGate:
    """A fitted gate. It is no module, so that no cast of a model's parameters to 16 bits changes
    its decisions.

    Attributes:
        layer: the index of the layer before which the base stream is read; the number of layers:
            after the last.
        features: what is read of the stream.
        mean, std, weight: of each feature, [F] in fp32; F is D, or 2 D with a running mean.
        bias: the score is `weight · (feature − mean) / std + bias`, the log odds that the text is
            new.
        threshold: tokens with a higher score are open, the others closed.
        open_ids: ids of the base's vocabulary that are open whatever their score, in order.
    """

    layer: int
    features: GateFeatures
    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: float
    threshold: float
    open_ids: tuple[int, ...] = ()

    def scores(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], the base stream before `layer`; document_ids: [B, S] -> the scores [B, S]
        in fp32.
        """
        features = gate_features(x, self.features, document_ids)
        mean = self.mean.to(x.device)
        std = self.std.to(x.device)
        weight = self.weight.to(x.device)
        return gate_scores(features, mean, std, weight, self.bias)

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], the base stream before `layer` -> which tokens are open by their score:
        bool [B, S]."""
        return self.scores(x, document_ids) > self.threshold

    def opens_id(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> which of them are open by their id alone: bool [B, S]."""
        if not self.open_ids:
            return torch.zeros_like(tokens, dtype=torch.bool)
        if tokens.device not in self._open_ids_on:
            # Copied to a device once: the host would wait for a copy in every pass.
            ids = torch.tensor(self.open_ids, dtype=torch.long, device="cpu")
            self._open_ids_on[tokens.device] = ids.to(tokens.device)
        return torch.isin(tokens, self._open_ids_on[tokens.device])

    @cached_property
    def _open_ids_on(self) -> dict[torch.device, Tensor]:
        """The ids that are open whatever their score, by device."""
        return {}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The gate's tensors in fp32, by name."""
        return {"mean": self.mean, "std": self.std, "weight": self.weight}


def gate_features(x: Tensor, features: GateFeatures, document_ids: Tensor | None = None) -> Tensor:
    """What a gate reads of the base stream x [B, S, D]: [B, S, F] in fp32.

    The first D features are x over its root mean square. With `token+running_mean` the other D are
    the mean of these over the document up to the token.
    """
    normal = stream_over_rms(x)
    if features == "token":
        return normal
    return torch.cat([normal, running_mean(normal, document_ids)], dim=-1)
