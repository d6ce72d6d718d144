"""The layers of one tensor-parallel rank: embedding and linear maps on their shards, LoRA's adapter
of a linear map, and norms whose gains every rank holds.

Their forward passes do not communicate: `collectives.enter_region` and `leave_region` enclose
several of them. In the backward pass the gradient of what several ranks hold is summed over these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.collectives import counted_once
from pipeline.parallel.experts import grouped_product
from pipeline.parallel.parameters import (
    quantization_of,
    sharded_parameter,
    sum_gradient_over_replicas,
    used_between_regions,
)
from pipeline.parallel.quantized import frozen_product
from pipeline.parallel.sharding import REPLICATED, VOCABULARY, Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale_math import layer_norm_by, rms_normalised, sum_of_squares, with_gain

NormKind = Literal["rmsnorm", "layernorm"]


class VocabularyParallelEmbedding(nn.Module):
    """Looks up tokens in this rank's rows of the vocabulary; tokens of other ranks give zeros.

    tokens: [B, S], result: [B, S, D], a partial sum over the ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.first, self.stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        # A token of another rank looks up row 0 and is then zeroed: exactly one rank contributes,
        # so the sum over the ranks is exact in any order.
        elsewhere = (tokens < self.first) | (tokens >= self.stop)
        rows = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class ColumnParallelLinear(nn.Module):
    """`Y = W X + b`, with the rows of W (and of b) split over the ranks.

    x: [..., in], y: [..., out / tp_size]. `units` is how many indivisible groups the rows form
    (heads).
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        partition = Partition(dim=0, units=units)
        self.weight = sharded_parameter((out_features, in_features), partition, tp)
        self.bias = sharded_parameter((out_features,), partition, tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # Key/value heads fewer than ranks are held by several ranks, and each uses them for other
        # query heads: their gradients are summed, or the copies would drift apart.
        bias = None if self.bias is None else sum_gradient_over_replicas(self.bias, self.tp)
        return _product(x, self.weight, bias, self.tp)


class RowParallelLinear(nn.Module):
    """The partial product of `Y = W X`, with the columns of W split over the ranks.

    x: [..., in / tp_size], y: [..., out], a partial sum over the ranks; rank 0's part includes the
    bias.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter(
            (out_features, in_features), Partition(dim=1, units=units), tp
        )
        self.bias = sharded_parameter((out_features,), Partition(), tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # `leave_region` adds up the ranks' results: a bias on each would count tp_size times.
        bias = None if self.bias is None else counted_once(self.bias, self.tp)
        return _product(x, self.weight, bias, self.tp)


class ReplicatedLinear(nn.Module):
    """`Y = W X` between regions, with all of W on every rank. x: [..., in], y: [..., out]."""

    def __init__(self, in_features: int, out_features: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((out_features, in_features), REPLICATED, tp)

    def forward(self, x: Tensor) -> Tensor:
        # Its output is not summed over ranks; under sequence parallelism each rank has other
        # positions, and only the weight's gradient must be summed.
        return F.linear(x, used_between_regions(self.weight, self.tp))


class ExpertLinear(nn.Module):
    """`Y = W_e X` for the rows of each expert e, with W: [experts, out, in].

    x: [N, in], its rows sorted by expert; ends: int32 [held experts], where the rows of each expert
    end; y: [N, out], undefined from the last end on. This rank holds all experts, or those of its
    place among the ranks that share them. With `dim` 1 each expert's rows are split over the
    tensor-parallel ranks (as ColumnParallelLinear), with 2 its columns (as RowParallelLinear: y is
    then a partial sum over them).
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, dim: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        shape = (experts, out_features, in_features)
        partition = Partition(
            dim=dim,
            units=shape[dim],
            expert_rank=tp.expert_parallel.rank,
            expert_size=tp.expert_parallel.size,
        )
        self.weight = sharded_parameter(shape, partition, tp)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        quantization = quantization_of(self.weight)
        if quantization is None:
            return grouped_product(x, self.weight, ends)
        return frozen_product(x, self.weight, quantization, ends=ends)


def _product(x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """x: [..., in] -> [..., out]; a frozen `weight` may be quantised."""
    quantization = quantization_of(weight)
    if quantization is not None:
        return frozen_product(x, weight, quantization, bias)
    return F.linear(x, sum_gradient_over_replicas(weight, tp), bias)


class LowRankAdapter(nn.Module):
    """s B A x, which LoRA adds to W x. x: [..., in] -> [..., out].

    W is [out, in], s is `scale`, A: [rank, in], B: [out, rank]. The result is a partial sum over
    the ranks if W is row-parallel.

    If W is split by rows, so is B; if by columns, so is A. The other factor is replicated, but each
    rank applies it to its part only, so its gradient is summed over the ranks. A and B are
    parameters of this module, so that ZeRO-3 gathers both at once.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        *,
        scale: float,
        partition: Partition = REPLICATED,
        tp: TensorParallel,
    ) -> None:
        """`shape` is that of the whole W, and `partition` says how W is split."""
        super().__init__()
        self.tp = tp
        self.scale = scale
        out_features, in_features = shape
        # Derived from W's own split, so that B A x is split, or partial, just as W x is: both are
        # added before the one collective of the region.
        partition_of_a = partition if partition.dim == 1 else REPLICATED
        partition_of_b = partition if partition.dim == 0 else REPLICATED
        self.a = sharded_parameter((rank, in_features), partition_of_a, tp)
        self.b = sharded_parameter((out_features, rank), partition_of_b, tp)

    def forward(self, x: Tensor) -> Tensor:
        reduced = F.linear(x, sum_gradient_over_replicas(self.a, self.tp))
        # The scale on the narrow activations: `rank` channels, not `out`.
        return F.linear(reduced * self.scale, sum_gradient_over_replicas(self.b, self.tp))


@dataclass(frozen=True)
class NormedChannels:
    """How an RMSNorm's mean square counts the channels of a base that was widened before.

    It counts the first `size` channels fully and the others times `rest_scale`, by which the base's
    folder stores them. The divisor is the full width.
    """

    size: int
    rest_scale: float

    def sum_of_squares(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., 1], in fp32."""
        return sum_of_squares(x, self.size, self.rest_scale)


class Gain(NamedTuple):
    """How an RMSNorm multiplies by its weight.

    Attributes:
        offset: the gain is 1 + weight.
        rounds_once: it multiplies in fp32.
    """

    offset: bool = False
    rounds_once: bool = False


PLAIN_GAIN = Gain()
"""Llama's: the weight itself, by which the rounded x is multiplied."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32; x: [..., size].

    Attributes:
        gain: how the weight multiplies.
        shared: how the weight's gradient is summed over ranks. In a region (`in_region`) x is this
            rank's heads; between regions it is, under sequence parallelism, this rank's positions.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        tp: TensorParallel,
        *,
        gain: Gain = PLAIN_GAIN,
        in_region: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.gain = gain
        self.tp = tp
        self.shared = sum_gradient_over_replicas if in_region else used_between_regions
        self.weight = sharded_parameter((size,), REPLICATED, tp)

    def normalised(self, x_fp32: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """x in fp32 over its root mean square; `mean_square` [..., 1] takes the place of its own.

        It reads no parameter, so that it may be called outside `forward` under ZeRO-3 too.
        """
        # The fused kernel where the norm is of x alone. A widened norm has the mean square of base
        # channels only (scale.widened_norm), for which torch has no kernel.
        if mean_square is None:
            return F.rms_norm(x_fp32, x_fp32.shape[-1:], eps=self.eps)
        return rms_normalised(x_fp32, mean_square, self.eps)

    def forward(
        self, x: Tensor, mean_square: Tensor | None = None, *, normal: Tensor | None = None
    ) -> Tensor:
        """`mean_square` [..., 1], if given, takes the place of the mean square of x.

        `normal` is what `normalised` makes of x, where the caller has it for several norms: each
        would keep its own for the backward pass.
        """
        # The copies of the gain on all ranks get equal gradients only after a sum: each rank has
        # other heads, or other positions. DeepSpeed reduces over data-parallel ranks only.
        weight = self.shared(self.weight, self.tp)
        if normal is None:
            normal = self.normalised(x.float(), mean_square)
        return with_gain(normal, weight, x.dtype, *self.gain)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias; x: [..., size].

    Mean and variance are taken of `statistics_of` where it is given.
    """

    def __init__(self, size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp
        self.weight = sharded_parameter((size,), REPLICATED, tp)
        self.bias = sharded_parameter((size,), REPLICATED, tp)

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        weight = used_between_regions(self.weight, self.tp)
        bias = used_between_regions(self.bias, self.tp)
        if statistics_of is None:
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        return layer_norm_by(statistics_of, x, weight, bias, self.eps)
