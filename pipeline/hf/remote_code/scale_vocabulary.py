"""From tokens to both streams, and from both streams to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_scale import ScaleConfig
from .scale_streams import StreamPath

NEVER = -1e30
"""A logit whose probability is 0; finite, so that logits can be subtracted."""


class ScaleEmbedding(nn.Module):
    """The base's token embedding beside the added columns, from which the expansion stream starts: [B, S, D + U]."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.base = nn.Embedding(config.vocab_size, config.hidden_size)
        self.expansion = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.scale = config.embedding_scale

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = torch.cat([self.base(tokens), self.expansion(tokens)], dim=-1)
        # Rounded to the type of the streams, and made on their device: `ScaleRotary` says why.
        return embedded if self.scale == 1.0 else embedded * embedded.new_full((), self.scale)


class ScaleOutput(nn.Module):
    """logits = base x + expansion x_up, or the router's choice of two paths. A tied base is the embedding's own.

    With `output_softcap` c a logit is c · tanh(z / c); the router compares z itself.
    """

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.threshold, self.softcap = config.router_threshold, config.output_softcap
        self.set_vocabulary(config)
        self.base = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.expansion = nn.Parameter(torch.empty(config.vocab_size, config.expansion_hidden_size))

    @property
    def weight(self) -> Tensor:
        """Both matrices as one [V, D + U], for libraries that compute logits, or a loss, from hidden states."""
        return torch.cat([self.base, self.expansion], dim=1)

    @property
    def bias(self) -> None:
        """None: there is none, which such libraries ask too."""

    def set_vocabulary(self, config: ScaleConfig) -> None:
        self.of_base = config.base_vocab_size or config.vocab_size
        self.only_base_after_closed = (
            config.gate_layer is not None and self.of_base < config.vocab_size
        )

    def forward(self, paths: list[StreamPath]) -> Tensor:
        """Logits [B, S, V] in fp32. The last path is the adapted one; if there are two, the first is the preserved."""
        z, x_up = self._base_logits(paths[-1].x), paths[-1].x_up
        if len(paths) == 2:
            z_p = self._base_logits(paths[0].x)
            old_p, old = z_p[..., : self.of_base], z[..., : self.of_base]
            preserved = (old_p * old).sum(-1, keepdim=True) > self.threshold * (
                old_p.square().sum(-1, keepdim=True) * old.square().sum(-1, keepdim=True)
            ).sqrt()
            z = torch.where(preserved, (z_p + z) / 2, z)
            x_up = torch.where(preserved, paths[0].x_up, x_up)
        z = self._capped(z + F.linear(x_up, self.expansion) if len(x_up) else z)
        if self.only_base_after_closed:
            # As `streams` leaves x_up.
            closed = (
                (x_up == 0).all(-1, keepdim=True)
                if len(x_up)
                else torch.ones_like(z[..., :1], dtype=torch.bool)
            )
            z = z.masked_fill(
                closed & (torch.arange(z.shape[-1], device=z.device) >= self.of_base), NEVER
            )
        return z

    def _base_logits(self, x: Tensor) -> Tensor:
        """In a product of their own, the base's columns are the base's to the bit, whether others follow or not."""
        if not self.only_base_after_closed:
            return F.linear(x, self.base).float()
        return torch.cat(
            [F.linear(x, self.base[: self.of_base]), F.linear(x, self.base[self.of_base :])], -1
        ).float()

    def _capped(self, z: Tensor) -> Tensor:
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap
