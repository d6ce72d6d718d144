"""Two residual streams, and the linear maps and norms that read and write both.

Every linear map has four blocks ("SCALE: Upscaled Continual Learning of Large Language Models", Eq. 1):

    [ Y    ]   [ base               expansion_to_base      ] [ X    ]
    [ Y^up ] = [ base_to_expansion  expansion_to_expansion ] [ X^up ]

`expansion_to_base` exists only in collaborative layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .configuration_scale import ScaleConfig


class StreamPath(NamedTuple):
    """The streams x [B, S, D] and x_up [B, S, U] of one path; x_up is [0, S, U] where the base runs alone.

    `masked` leaves every expansion_to_base out, as a mask [B, S, 1] for some of the tokens. Maps and norms leave an
    x_up of no sequence as it is.
    """

    x: Tensor
    x_up: Tensor
    masked: bool | Tensor = False

    def normed(self, norm: nn.Module | None) -> StreamPath:
        if norm is None:
            return self
        x, x_up = norm(self.x, self.x_up)
        return self._replace(x=x, x_up=x_up)


class WidenedLinear(nn.Module):
    """x [..., in], x_up [..., in_up] -> y [..., out], y_up [..., out_up]. Sizes are (base, expansion) pairs."""

    def __init__(
        self, sizes_in: tuple[int, int], sizes_out: tuple[int, int], bias: bool, collaborative: bool
    ) -> None:
        super().__init__()
        (size_in, up_in), (size_out, up_out) = sizes_in, sizes_out
        self.base = nn.Linear(size_in, size_out, bias=bias)
        self.expansion_to_base = nn.Linear(up_in, size_out, bias=False) if collaborative else None
        self.base_to_expansion = nn.Linear(size_in, up_out, bias=bias)
        self.expansion_to_expansion = nn.Linear(up_in, up_out, bias=False)

    def forward(self, x: Tensor, x_up: Tensor, masked: bool | Tensor) -> tuple[Tensor, Tensor]:
        y = self.base(x)
        if len(x_up) == 0:
            return y, x_up
        if self.expansion_to_base is not None and masked is not True:
            y = widened(y, self.expansion_to_base(x_up), masked)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


def widened(y: Tensor, change: Tensor, masked: bool | Tensor) -> Tensor:
    """y + change, both [B, S, out], but for tokens that are `masked` [B, S, 1]."""
    return torch.where(masked, y, y + change) if isinstance(masked, Tensor) else y + change


class StreamNorm(nn.Module):
    """RMSNorm or LayerNorm of one stream [..., size], in fp32; its statistics may be those of the other stream.

    With `normed_size` (RMSNorm only) the channels after the first so many count times `rest_scale` in them. With
    `gain_offset` (RMSNorm only) the gain is 1 + weight.
    """

    def __init__(
        self,
        config: ScaleConfig,
        size: int,
        normed_size: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.gain_offset = config.gain_offset
        self.normed_size, self.rest_scale = normed_size, config.rest_scale
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = (
            nn.Parameter(torch.zeros(size)) if (kind or config.norm) == "layernorm" else None
        )

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        source = (x if statistics_of is None else statistics_of).float()
        if self.bias is None:
            total = source[..., : self.normed_size].square().sum(-1, keepdim=True)
            if self.normed_size is not None:
                total = total + self.rest_scale**2 * source[..., self.normed_size :].square().sum(
                    -1, keepdim=True
                )
            normal = x.float() * torch.rsqrt(total / source.shape[-1] + self.eps)
            if self.gain_offset:
                return (normal * (1 + self.weight.float())).to(x.dtype)
            return self.weight * normal.to(x.dtype)
        variance, mean = torch.var_mean(source, dim=-1, keepdim=True, correction=0)
        normal = (x.float() - mean) * torch.rsqrt(variance + self.eps)
        return self.weight * normal.to(x.dtype) + self.bias


class WidenedNorm(nn.Module):
    """Both streams normalised: the base by its own statistics, the expansion by its own or by the base's."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.shared = config.norm_statistics == "base"
        of_base = config.normed_size if self.shared else None
        self.base = StreamNorm(config, config.hidden_size, config.normed_size)
        self.expansion = StreamNorm(config, config.expansion_hidden_size, of_base)

    def forward(self, x: Tensor, x_up: Tensor) -> tuple[Tensor, Tensor]:
        up = self.expansion(x_up, x if self.shared else None) if len(x_up) else x_up
        return self.base(x), up


class WidenedHeadNorm(nn.Module):
    """Queries or keys normalised, each head or the base's and the added heads as two wholes, by own statistics."""

    def __init__(self, config: ScaleConfig, heads: tuple[int, int]) -> None:
        super().__init__()
        of_all = config.query_key_norm == "all"
        size, size_up = heads if of_all else (config.head_dim, config.head_dim)
        self.base = StreamNorm(config, size, kind="rmsnorm")
        # With the base's statistics, the added heads have the base's gains too.
        own = of_all or config.norm_statistics == "separate"
        self.expansion = StreamNorm(config, size_up, kind="rmsnorm") if own else None

    def forward(self, heads: Tensor, heads_up: Tensor) -> tuple[Tensor, Tensor]:
        up = self.base if self.expansion is None else self.expansion
        return self._normed(self.base, heads), self._normed(up, heads_up) if len(
            heads_up
        ) else heads_up

    @staticmethod
    def _normed(norm: StreamNorm, flat: Tensor) -> Tensor:
        return norm(flat.unflatten(-1, (-1, len(norm.weight)))).flatten(-2)
