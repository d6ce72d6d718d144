"""The gate: which tokens are new to the base, by a linear score of the base's own stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_scale import ScaleConfig
from .scale_cache import WINDOW_DOUBLINGS, GateCache


class ScaleGate(nn.Module):
    """Which tokens are open, by a linear score of the base's x [B, S, D].

    Read are x over its root mean square, standardised, and with `token+running_mean` also its mean over the text so
    far, in which each token counts less by `gate_decay` with every token after it. All is computed in fp32.
    """

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.decay, self.bias, self.threshold = (
            config.gate_decay,
            config.gate_bias,
            config.gate_threshold,
        )
        self.has_mean = config.gate_features == "token+running_mean"
        size = config.hidden_size * (2 if self.has_mean else 1)
        # Servers build a model in the type of its weights; a gate in 16 bits would decide otherwise.
        self.mean = nn.Parameter(torch.zeros(size, dtype=torch.float32))
        self.std = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float32))

    def forward(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """Whether each token is open: bool [B, S, 1]; see `scores`."""
        return self.scores(x, is_text, documents, cache) > self.threshold

    def scores(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """The log odds that each token is new [B, S, 1]. What the running mean needs is cached.

        is_text: bool [B, S], false for padding; documents: [B, S], equal numbers where the mean may read. None: all.
        """
        features = x.float()
        features = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-12)
        if self.has_mean:
            features = torch.cat(
                [features, self._running_mean(features, is_text, documents, cache)], dim=-1
            )
        return ((features - self.mean) / self.std * self.weight).sum(-1, keepdim=True) + self.bias

    def _running_mean(
        self,
        values: Tensor,
        is_text: Tensor | None,
        documents: Tensor | None,
        cache: GateCache | None,
    ) -> Tensor:
        length = values.shape[1]
        counts = (
            values.new_ones(*values.shape[:2], 1)
            if is_text is None
            else is_text.to(values).unsqueeze(-1)
        )
        values = values * counts
        if cache is not None:
            read = cache.update(values.unsqueeze(1), counts.unsqueeze(1))
            values, counts = (tensor[:, 0] for tensor in read)
        total = torch.cat([values, counts], dim=-1)
        for doubling in range(WINDOW_DOUBLINGS):
            shift = 2**doubling
            if shift >= total.shape[1]:
                break
            earlier = self.decay**shift * total[:, :-shift]
            if documents is not None:
                earlier = earlier * (documents[:, shift:] == documents[:, :-shift]).unsqueeze(-1)
            total = torch.cat([total[:, :shift], total[:, shift:] + earlier], dim=1)
        total = total[:, -length:]
        return total[..., :-1] / total[..., -1:].clamp(min=1e-30)


def texts_of(
    x: Tensor, attention_mask: Any, position_ids: Tensor, cache: Any
) -> tuple[Tensor | None, Tensor | None]:
    """What a gate reads of x [B, S, D] beside it: which tokens are text and not padding, and of which document each is.

    Both are [B, S]; None: all are, and of one document in each row.
    """
    is_text, documents = None, None
    if attention_mask is None and cache is None:
        # As for attention (`create_causal_mask`): positions that begin again are another text in the same row.
        breaks = position_ids.expand(x.shape[:2]).diff(dim=1) != 1
        documents = F.pad(breaks.cumsum(dim=1), (1, 0))
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_text = attention_mask[:, -x.shape[1] :].bool()
    return is_text, documents
