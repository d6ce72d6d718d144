"""The width-expanded linear maps (paper, Eq. 1), on one rank's shard.

    [ Y    ]   [ W    W12 ] [ X    ]
    [ Y^up ] = [ W21  W22 ] [ X^up ]

The two streams stay two tensors, and each block is a submodule of its own. So the base stream runs the very products
that the base model runs; autograd builds nothing for W where X depends on no trained parameter; and ZeRO-3 gathers W
and the new blocks apart. How a new block is split follows from the kind of its base layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.collectives import leave_region
from pipeline.parallel.layers import (
    ColumnParallelLinear,
    LowRankAdapter,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from pipeline.parallel.sharding import REPLICATED, sharded_parameter, used_between_regions
from pipeline.parallel.topology import SINGLE, TensorParallel

BLOCKS = (
    "expansion_to_base.weight",
    "base_to_expansion.weight",
    "expansion_to_expansion.weight",
    "adapter.a",
    "adapter.b",
)


def block_kind(name: str) -> str | None:
    """Which matrix beside a base weight the parameter `name` is, or None: `expansion_to_base`, ..., `adapter.b`."""
    return next((block.removesuffix(".weight") for block in BLOCKS if name.endswith(f".{block}")), None)


@dataclass(frozen=True)
class Part:
    """One side of a block: its size, and how many indivisible units (heads, or single features) it is made of."""

    size: int
    units: int


class WidenedLinear(nn.Module):
    """Y = W X + W12 X^up and Y^up = W21 X + W22 X^up, or Y = W X alone where nothing is added.

    x: [..., in], x_up: [..., in_up] -> y: [..., out], y_up: [..., out_up]. W12 exists in collaborative layers only. An
    `adapter` may be put beside W where nothing is widened. `masked` leaves both out: y is then the base's.
    """

    kind: type[ColumnParallelLinear] | type[RowParallelLinear]

    def __init__(
        self,
        base: tuple[Part, Part],
        expansion: tuple[Part, Part] | None,
        *,
        bias: bool,
        collaborative: bool = False,
        tp: TensorParallel,
    ) -> None:
        """`base` and `expansion` are the (input, output) parts of the pretrained map and of what is added to it."""
        super().__init__()
        self.tp = tp
        base_in, base_out = base
        self.base: nn.Module = self._block(base_in, base_out, bias)
        self.adapter: LowRankAdapter | None = None
        self.expansion_to_base: nn.Module | None = None
        self.base_to_expansion: nn.Module | None = None
        self.expansion_to_expansion: nn.Module | None = None
        if expansion is not None:
            expansion_in, expansion_out = expansion
            if collaborative:
                self.expansion_to_base = self._block(expansion_in, base_out, False)
            self.base_to_expansion = self._block(base_in, expansion_out, bias)
            self.expansion_to_expansion = self._block(expansion_in, expansion_out, False)

    def _block(self, source: Part, target: Part, bias: bool) -> nn.Module:
        split = source if self.kind is RowParallelLinear else target
        return self.kind(source.size, target.size, bias=bias, units=split.units, tp=self.tp)

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool = False) -> tuple[Tensor, Tensor | None]:
        y: Tensor = self.base(x)
        if self.adapter is not None and not masked:
            y = y + self.adapter(x)
        if self.base_to_expansion is None or self.expansion_to_expansion is None or x_up is None:
            return y, None
        if self.expansion_to_base is not None and not masked:
            y = y + self.expansion_to_base(x_up)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


class WidenedColumnLinear(WidenedLinear):
    """The widened query, key, value, gate and up maps: every block is split by rows, each input is whole."""

    kind = ColumnParallelLinear


class WidenedRowLinear(WidenedLinear):
    """The widened output and down maps: every block is split by columns; the results are still to be summed."""

    kind = RowParallelLinear


# --- The widened embedding: the base's rows, and beside them `W_in^up`, from which the expansion stream starts ------


class WidenedEmbedding(nn.Module):
    """tokens: [B, S] -> x: [B, S, D], x_up: [B, S, U] (None where nothing is added).

    Sequence-parallel ranks get their own positions of both: [B, S / tp_size, ...].
    """

    def __init__(self, vocab_size: int, hidden_size: int, expansion_size: int | None, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.base = VocabularyParallelEmbedding(vocab_size, hidden_size, tp=tp)
        self.expansion: VocabularyParallelEmbedding | None = None
        if expansion_size is not None:
            self.expansion = VocabularyParallelEmbedding(vocab_size, expansion_size, tp=tp)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return leave_region(self.tp, self.base(tokens), None if self.expansion is None else self.expansion(tokens))


# --- Normalisation of two streams -----------------------------------------------------------------------------------
# The base stream is normalised by its own statistics only, or preservation would break. For the expansion stream the
# paper leaves two choices: `separate`, its own statistics, and `base`, those of the base stream, which is what lets a
# trained model leave as an ordinary wider one.

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
