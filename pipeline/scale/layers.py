"""The width-expanded layers on one rank's shard: linear maps (SCALE, Eq. 1), embedding and norms; and Route's router.

    [ Y    ]   [ W    W12 ] [ X    ]
    [ Y^up ] = [ W21  W22 ] [ X^up ]

The two streams are separate tensors, and each block is a separate submodule. So the base stream runs the same matrix
products as the base model, autograd builds no graph for W where X depends on no trained parameter, and ZeRO-3 gathers W
and the new blocks separately. A new block is split over the ranks like the base weight of the same map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.collectives import leave_region
from pipeline.parallel.layers import (
    ColumnParallelLinear,
    ExpertLinear,
    LowRankAdapter,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from pipeline.parallel.sharding import REPLICATED, sharded_parameter, shared_by_neighbours, used_between_regions
from pipeline.parallel.topology import SINGLE, TensorParallel

Streams = tuple[Tensor, Tensor | None]
"""The base stream x: [B, S, D], and the expansion stream x_up: [B, S, U], None where nothing is added."""

NormKind = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class Part:
    """The size of one side of a block, and how many indivisible units (heads, or single features) it consists of."""

    size: int
    units: int


Parts = tuple[Part, Part | None]
"""One side of a widened map: the base's part, and the added part."""


class WidenedLinear(nn.Module):
    """Y = W X + W12 X^up and Y^up = W21 X + W22 X^up, or Y = W X alone without an expansion.

    x: [..., in], x_up: [..., in_up] -> y: [..., out], y_up: [..., out_up]. W12 exists in collaborative layers only.
    LoRA adds an `adapter` to W. `masked` skips W12 and the adapter, so that y is the base's; as a mask [..., 1] it does
    so for some of the tokens, exactly, for W12 alone: an adapter counts then for all.
    """

    kind: type[ColumnParallelLinear] | type[RowParallelLinear]

    def __init__(
        self, source: Parts, target: Parts, *, bias: bool, collaborative: bool = False, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.base: nn.Module = self._block(source[0], target[0], bias)
        self.adapter: LowRankAdapter | None = None
        self.expansion_to_base: nn.Module | None = None
        self.base_to_expansion: nn.Module | None = None
        self.expansion_to_expansion: nn.Module | None = None
        if source[1] is not None and target[1] is not None:
            if collaborative:
                self.expansion_to_base = self._block(source[1], target[0], False)
            self.base_to_expansion = self._block(source[0], target[1], bias)
            self.expansion_to_expansion = self._block(source[1], target[1], False)

    def _block(self, source: Part, target: Part, bias: bool) -> nn.Module:
        split = source if self.kind is RowParallelLinear else target
        return self.kind(source.size, target.size, bias=bias, units=split.units, tp=self.tp)

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool | Tensor = False) -> Streams:
        y: Tensor = self.base(x)
        if self.adapter is not None and masked is not True:
            y = y + self.adapter(x)
        if self.base_to_expansion is None or self.expansion_to_expansion is None or x_up is None:
            return y, None
        if self.expansion_to_base is not None and masked is not True:
            y = masked_sum(y, self.expansion_to_base(x_up), masked)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


def masked_sum(y: Tensor, change: Tensor, masked: bool | Tensor) -> Tensor:
    """y + change, [..., D]; y alone for the tokens of a mask [..., 1]."""
    return torch.where(masked, y, y + change) if isinstance(masked, Tensor) else y + change


def base_maps(model: nn.Module) -> dict[str, nn.Module]:
    """The base's own maps W in all linear maps of `model`, those of experts too, by their path."""
    modules = list(model.named_modules())
    maps = {f"{path}.base": module.base for path, module in modules if isinstance(module, WidenedLinear)}
    return maps | {path: module for path, module in modules if isinstance(module, ExpertLinear)}


class WidenedColumnLinear(WidenedLinear):
    """The widened query, key, value, gate and up maps: blocks are split by rows, inputs are not split."""

    kind = ColumnParallelLinear


class WidenedRowLinear(WidenedLinear):
    """The widened output and down maps: blocks are split by columns, results are partial sums over the ranks."""

    kind = RowParallelLinear


class WidenedEmbedding(nn.Module):
    """tokens: [B, S] -> x: [B, S, D], x_up: [B, S, U]; with sequence parallelism [B, S / tp_size, ...].

    x_up starts as a look-up in `W_in^up`. Tokens from `vocab_size` on are those of `new_rows`: [n, D + U].
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, expansion_size: int | None, *, new_rows: int = 0, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.base = VocabularyParallelEmbedding(vocab_size, hidden_size, tp=tp)
        self.expansion: VocabularyParallelEmbedding | None = None
        if expansion_size is not None:
            self.expansion = VocabularyParallelEmbedding(vocab_size, expansion_size, tp=tp)
        self.new_rows: VocabularyParallelEmbedding | None = None
        if new_rows:
            self.new_rows = VocabularyParallelEmbedding(new_rows, hidden_size + (expansion_size or 0), tp=tp)

    def forward(self, tokens: Tensor) -> Streams:
        if self.new_rows is not None:
            return self._with_new_rows(tokens, self.new_rows)
        return leave_region(self.tp, self.base(tokens), None if self.expansion is None else self.expansion(tokens))

    def _with_new_rows(self, tokens: Tensor, new_rows: nn.Module) -> Streams:
        is_new = tokens >= self.vocab_size
        new = new_rows((tokens - self.vocab_size).masked_fill(~is_new, 0))
        is_new, old_tokens = is_new.unsqueeze(-1), tokens.masked_fill(is_new, 0)
        x = torch.where(is_new, new[..., : self.hidden_size], self.base(old_tokens))
        x_up = None
        if self.expansion is not None:
            x_up = torch.where(is_new, new[..., self.hidden_size :], self.expansion(old_tokens))
        return leave_region(self.tp, x, x_up)


@dataclass(frozen=True)
class NormedChannels:
    """How an RMSNorm's mean square counts channels: the first `size` fully, the others times `rest_scale`.

    Such a base was widened before, and its folder stores the others times `rest_scale`. The divisor is the full width.
    """

    size: int
    rest_scale: float

    def sum_of_squares(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., 1], in fp32."""
        squares = x.float().square()
        rest = squares[..., self.size :].sum(-1, keepdim=True)
        return squares[..., : self.size].sum(-1, keepdim=True) + self.rest_scale**2 * rest


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32; x: [..., size].

    With `gain_offset` the gain is 1 + weight. `in_region`: x is this rank's heads, not its positions.
    """

    def __init__(
        self, size: int, eps: float, tp: TensorParallel, *, gain_offset: bool = False, in_region: bool = False
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.gain_offset = gain_offset
        self.tp = tp
        self.shared = shared_by_neighbours if in_region else used_between_regions
        self.weight = sharded_parameter((size,), REPLICATED, tp)

    def forward(self, x: Tensor, mean_square: Tensor | None = None, *, x_fp32: Tensor | None = None) -> Tensor:
        """`mean_square` [..., 1] takes the place of that of x. `x_fp32` is x in fp32, where the caller has it: a second
        copy would be kept for the backward pass."""
        weight = self.shared(self.weight, self.tp)
        x_fp32 = x.float() if x_fp32 is None else x_fp32
        if mean_square is None:
            normal = F.rms_norm(x_fp32, x.shape[-1:], eps=self.eps)
        else:
            normal = x_fp32 * torch.rsqrt(mean_square + self.eps)
        # As in transformers, which multiplies by 1 + weight in fp32.
        return (normal * (1 + weight.float())).to(x.dtype) if self.gain_offset else weight * normal.to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias; x: [..., size]. Mean and variance are those of `statistics_of` where given."""

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


class WidenedNorm(nn.Module):
    """x: [..., D], x_up: [..., U] -> the same shapes, normalised; each stream has its own gains (and biases).

    The base stream is normalised by its own statistics only, otherwise it would not be preserved. The paper does not
    specify which `statistics` normalise the expansion stream: `separate` are its own; `base` are those of the base
    stream, so that a trained model can be exported as an ordinary wider one. `normed`: how those count its channels.
    """

    def __init__(
        self,
        kind: NormKind,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        statistics: Literal["separate", "base"] = "separate",
        normed: NormedChannels | None = None,
        gain_offset: bool = False,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.normed = normed
        norm: Any = partial(LayerNorm, eps=eps, tp=tp)
        if kind == "rmsnorm":
            norm = partial(RMSNorm, eps=eps, tp=tp, gain_offset=gain_offset)
        self.base = norm(size)
        self.expansion = None if expansion_size is None else norm(expansion_size)
        self._stored_scale: float | None = None

    def as_stored(self, scale: float) -> None:
        """From now on computes as an ordinary norm over both streams, where added channels are stored times `scale`."""
        self._stored_scale = scale
        if self.normed is not None:
            self.normed = NormedChannels(self.normed.size, scale)

    def forward(self, x: Tensor, x_up: Tensor | None) -> Streams:
        if isinstance(self.base, LayerNorm):
            of_base = x if self.statistics == "base" else None
            return self.base(x), None if self.expansion is None or x_up is None else self.expansion(x_up, of_base)
        x_fp32, width = x.float(), x.shape[-1]
        mean_square = None if self.normed is None else self.normed.sum_of_squares(x_fp32) / width
        if self.expansion is None or x_up is None:
            return self.base(x, mean_square, x_fp32=x_fp32), None
        if self._stored_scale is not None:
            added = self._stored_scale**2 * x_up.float().square().sum(-1, keepdim=True)
            mean_square = ((self.normed or NormedChannels(width, 1.0)).sum_of_squares(x_fp32) + added) / width
            return self.base(x, mean_square, x_fp32=x_fp32), self.expansion(x_up, mean_square)
        y = self.base(x, mean_square, x_fp32=x_fp32)
        if self.statistics == "separate":
            return y, self.expansion(x_up)
        if mean_square is None:
            mean_square = x_fp32.square().sum(-1, keepdim=True) / width
        return y, self.expansion(x_up, mean_square)


class WidenedHeadNorm(nn.Module):
    """The RMSNorm of queries or keys: [..., H·K] and [..., H_up·K] -> the same shapes.

    Every `size` channels, a head or all heads, are normalised by their own statistics, so what the added heads do
    leaves the base's alone. The added heads have gains of their own (`expansion_size` channels), or with None those of
    the base: an ordinary wider model has one gain for all its heads.
    """

    def __init__(
        self, size: int, expansion_size: int | None, *, eps: float, gain_offset: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, eps=eps, tp=tp, gain_offset=gain_offset, in_region=True)
        self.base = norm(size)
        self.expansion = None if expansion_size is None else norm(expansion_size)

    def forward(self, heads: Tensor, heads_up: Tensor | None) -> Streams:
        up = self.base if self.expansion is None else self.expansion
        return self._normed(self.base, heads), None if heads_up is None else self._normed(up, heads_up)

    @staticmethod
    def _normed(norm: RMSNorm, flat: Tensor) -> Tensor:
        # Not by the weight's shape: ZeRO-3 has gathered it in the norm's own forward pass only.
        normed: Tensor = norm(flat.unflatten(-1, (-1, norm.size)))
        return normed.flatten(-2)


@torch.no_grad()
def preserved_tokens(z_p: Tensor, z_a: Tensor, threshold: float, tp: TensorParallel) -> Tensor:
    """The router of SCALE-Route (Eq. 5): a mask [N] of the tokens where cos(Z_p, Z_a) > threshold.

    z_p, z_a: [N, V / tp_size], this rank's columns of the base logits of the preserved and the adapted path, in fp32
    and without padding. The cosine takes three sums a token: one all-reduce where the vocabulary is split.
    """
    # `(z_p * z_a).sum(-1)` would need a temporary as large as the logits.
    product = torch.bmm(z_p.unsqueeze(1), z_a.unsqueeze(2)).flatten()
    squares = (torch.linalg.vector_norm(z, dim=-1).square() for z in (z_p, z_a))
    sums = torch.stack([product, *squares])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    product, norm_p, norm_a = sums
    return product > threshold * (norm_p * norm_a).sqrt()
