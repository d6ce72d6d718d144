"""Rotary position embedding. The heads that SCALE adds turn by the same table as the base's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.model.spec import RotarySpec


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """The angle per position of each rotated pair: [head_dim · fraction / 2], in fp32."""
    rotated = int(head_dim * spec.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
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


class RotaryTable:
    """cos and sin for given positions, and the rotation of queries and keys with them."""

    def __init__(self, spec: RotarySpec, head_dim: int, positions: Tensor, dtype: torch.dtype) -> None:
        """positions: [B, S] or [S]."""
        frequencies = inverse_frequencies(spec, head_dim).to(positions.device)
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
