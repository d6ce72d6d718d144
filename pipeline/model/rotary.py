"""Rotary position embedding. The heads that SCALE adds turn by the same table as the base's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.model.spec import RotarySpec


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """The angle per position of each rotated pair: [head_dim · fraction / 2], in fp32, on the host."""
    rotated = int(head_dim * spec.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: Tensor, spec: RotarySpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    context = spec.original_max_position_embeddings
    blend = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


class RotaryEmbedding:
    """One decoder's: it makes tables for positions, from frequencies that it sends to their device once.

    Each sending would make the host wait until a GPU has come to it. They are no buffer, which DeepSpeed would round.
    """

    def __init__(self, spec: RotarySpec, head_dim: int) -> None:
        self._spec = spec
        self._head_dim = head_dim
        self._frequencies: Tensor | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """positions: [B, S] or [S]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self._spec, self._head_dim).to(positions.device)
        return RotaryTable(self._frequencies, positions, dtype)


class RotaryTable:
    """cos and sin for given positions, and the rotation of queries and keys with them."""

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        """frequencies: as `inverse_frequencies` gives them; positions: [B, S] or [S]."""
        angles = positions.float().unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-3)
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, H, S, K]; beyond the rotated fraction of K nothing changes."""
        width = self.cos.shape[-1]
        turned = heads[..., :width]
        half = width // 2
        partner = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        turned = turned * self.cos + partner * self.sin
        return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)
