"""Normalisation of two streams.

The base stream is normalised by its own statistics only, or preservation would break. For the expansion stream the
paper leaves two choices: `separate`, its own statistics, and `base`, those of the base stream, which is what lets a
trained model leave as an ordinary wider one.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.parameter import sharded_parameter
from pipeline.parallel.sharding import REPLICATED
from pipeline.parallel.topology import SINGLE

NormKind = Literal["rmsnorm", "layernorm"]


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32. `statistics_of` names another tensor to take the mean square from."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = sharded_parameter((size,), REPLICATED, SINGLE)

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        if statistics_of is None:
            return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)
        scale = torch.rsqrt(statistics_of.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias. `statistics_of` names another tensor to take mean and variance from."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = sharded_parameter((size,), REPLICATED, SINGLE)
        self.bias = sharded_parameter((size,), REPLICATED, SINGLE)

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        if statistics_of is None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        source = statistics_of.float()
        variance, mean = torch.var_mean(source, dim=-1, keepdim=True, correction=0)
        normal = (x.float() - mean) * torch.rsqrt(variance + self.eps)
        return self.weight * normal.to(x.dtype) + self.bias


def make_norm(kind: NormKind, size: int, eps: float) -> RMSNorm | LayerNorm:
    """A norm over one stream of `size`."""
    return RMSNorm(size, eps) if kind == "rmsnorm" else LayerNorm(size, eps)


class WidenedNorm(nn.Module):
    """x: [..., D], x_up: [..., U] -> the same, normalised; the streams have gains (and biases) of their own."""

    def __init__(
        self,
        kind: NormKind,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        statistics: Literal["separate", "base"] = "separate",
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.base = make_norm(kind, size, eps)
        self.expansion = None if expansion_size is None else make_norm(kind, expansion_size, eps)

    def forward(self, x: Tensor, x_up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self.base(x)
        if self.expansion is None or x_up is None:
            return y, None
        return y, self.expansion(x_up, x if self.statistics == "base" else None)
