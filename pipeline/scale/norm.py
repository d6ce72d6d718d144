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

from pipeline.parallel.parameter import sharded_parameter, used_between_regions
from pipeline.parallel.sharding import REPLICATED
from pipeline.parallel.topology import SINGLE, TensorParallel

NormKind = Literal["rmsnorm", "layernorm"]


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32. `statistics_of` names another tensor to take the mean square from.

    With `normed_size` only so many channels are summed there, and the others count as zeros.
    """

    def __init__(self, size: int, eps: float, tp: TensorParallel, normed_size: int | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.normed_size = normed_size
        self.tp = tp
        self.weight = sharded_parameter((size,), REPLICATED, tp)

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        weight = used_between_regions(self.weight, self.tp)
        if statistics_of is None and self.normed_size is None:
            return weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)
        source = x if statistics_of is None else statistics_of
        squares = source[..., : self.normed_size].float().pow(2)
        scale = torch.rsqrt(squares.sum(-1, keepdim=True) / source.shape[-1] + self.eps)
        return weight * (x.float() * scale).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias. `statistics_of` names another tensor to take mean and variance from."""

    def __init__(self, size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp
        self.weight = sharded_parameter((size,), REPLICATED, tp)
        self.bias = sharded_parameter((size,), REPLICATED, tp)

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        weight, bias = (used_between_regions(parameter, self.tp) for parameter in (self.weight, self.bias))
        if statistics_of is None:
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        source = statistics_of.float()
        variance, mean = torch.var_mean(source, dim=-1, keepdim=True, correction=0)
        normal = (x.float() - mean) * torch.rsqrt(variance + self.eps)
        return weight * normal.to(x.dtype) + bias


def make_norm(
    kind: NormKind, size: int, eps: float, tp: TensorParallel, normed_size: int | None = None
) -> RMSNorm | LayerNorm:
    """A norm over one stream of `size`. No LayerNorm leaves channels out."""
    return RMSNorm(size, eps, tp, normed_size) if kind == "rmsnorm" else LayerNorm(size, eps, tp)


class WidenedNorm(nn.Module):
    """x: [..., D], x_up: [..., U] -> the same, normalised; the streams have gains (and biases) of their own.

    `normed_size`: the base's statistics are those of its first channels.
    """

    def __init__(
        self,
        kind: NormKind,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        statistics: Literal["separate", "base"] = "separate",
        normed_size: int | None = None,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        of_base = normed_size if statistics == "base" else None
        self.base = make_norm(kind, size, eps, tp, normed_size)
        self.expansion = None if expansion_size is None else make_norm(kind, expansion_size, eps, tp, of_base)

    def forward(self, x: Tensor, x_up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self.base(x)
        if self.expansion is None or x_up is None:
            return y, None
        return y, self.expansion(x_up, x if self.statistics == "base" else None)
