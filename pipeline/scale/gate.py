"""The gate: a logistic probe on the base stream that decides per token whether the text is new.

A closed token takes no W12 and no Z^up: it gets what the base gives. The gate reads the stream where no trained block
has changed it, so its decisions do not depend on what was trained. It is fitted after training, and used in inference
only (docs/gate.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeline.config.run import GateFeatures
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_linear import Streams

DECAY = 0.8
"""By how much a token counts less in the running mean with each token that follows it."""
WINDOW_DOUBLINGS = 7
"""The running mean reads the last 2 ** 7 tokens: 0.8 ** 128 is below the resolution of fp32."""
_SMALLEST_SQUARE = 1e-12
NUMBERS = ("layer", "features", "bias", "threshold")
"""All that a gate consists of beside its tensors, by name."""


@dataclass(frozen=True)
class Gate:
    """A fitted gate. It is no module, so that no cast of a model's parameters to 16 bits changes its decisions.

    Attributes:
        layer: the index of the layer before which the base stream is read; the number of layers: after the last.
        features: what is read of the stream.
        mean, std, weight: of each feature, [F] in fp32; F is D, or 2 D with a running mean.
        bias: the score is `weight · (feature − mean) / std + bias`, the log odds that the text is new.
        threshold: tokens with a higher score are open, the others closed.
    """

    layer: int
    features: GateFeatures
    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: float
    threshold: float

    def scores(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], the base stream before `layer`; document_ids: [B, S] -> the scores [B, S] in fp32."""
        features = gate_features(x, self.features, document_ids)
        mean, std, weight = (tensor.to(x.device) for tensor in (self.mean, self.std, self.weight))
        # Not a matrix product: its rounding may depend on the number of tokens, and TF32 would shorten it.
        return ((features - mean) / std * weight).sum(-1) + self.bias

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], the base stream before `layer` -> which tokens are open: bool [B, S]."""
        return self.scores(x, document_ids) > self.threshold

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: getattr(self, name) for name in ("mean", "std", "weight")}


def deepest_gate_layer(plan: ExpansionPlan) -> int:
    """The highest layer before which the model has the exact base stream (the number of layers: after the last).

    Preserve has it everywhere, Route on its preserved path, Adapt up to the first layer with W12.
    """
    return plan.num_layers if plan.routed else plan.l_fp


def gate_features(x: Tensor, features: GateFeatures, document_ids: Tensor | None = None) -> Tensor:
    """x: [B, S, D], the base stream -> [B, S, F] in fp32: it over its root mean square, and that one's running mean."""
    normal = x.float()
    normal = normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + _SMALLEST_SQUARE)
    return (
        normal
        if features == "token"
        else torch.cat([normal, running_mean(normal, document_ids)], dim=-1)
    )


def running_mean(values: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """values: [B, S, D] -> the mean of each token and those before it in its document, which decay: [B, S, D].

    A token d tokens back weighs DECAY ** d, and nothing beyond the window. The sum is built of pairs, pairs of pairs
    and so on. So every token's mean is the same sum in the same order, however the text is cut into calls that see the
    whole window, and a text takes a few passes over the tensor and not one for every token.
    """
    total = torch.cat([values, values.new_ones(*values.shape[:2], 1)], dim=-1)
    for doubling in range(WINDOW_DOUBLINGS):
        shift = 2**doubling
        if shift >= values.shape[1]:
            break
        earlier = DECAY**shift * total[:, :-shift]
        if document_ids is not None:
            earlier = earlier * (document_ids[:, shift:] == document_ids[:, :-shift]).unsqueeze(-1)
        total = torch.cat([total[:, :shift], total[:, shift:] + earlier], dim=1)
    return total[..., :-1] / total[..., -1:]


def choose_path(closed: Tensor, preserved: Streams, adapted: Streams) -> Streams:
    """The normalised last states of each token's path. closed: [B, S, 1]; x: [B, S, D], x_up: [B, S, U].

    A closed token keeps the preserved x, and an x_up of zeros, which adds exactly nothing to its logits.
    """
    x, x_up = torch.where(closed, preserved[0], adapted[0]), adapted[1]
    return x, None if x_up is None else x_up.masked_fill(closed, 0)
