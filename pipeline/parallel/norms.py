"""RMSNorm and LayerNorm whose gains every tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.sharding import (
    REPLICATED,
    sharded_parameter,
    sum_gradient_over_replicas,
    used_between_regions,
)
from pipeline.parallel.topology import TensorParallel
from pipeline.scale_math import layer_norm_by, rms_normalised, sum_of_squares, with_gain

NormKind = Literal["rmsnorm", "layernorm"]


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


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32; x: [..., size].

    Attributes:
        gain_offset: the gain is 1 + weight.
        shared: how the weight's gradient is summed over ranks. In a region (`in_region`) x is this
            rank's heads; between regions it is, under sequence parallelism, this rank's positions.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        tp: TensorParallel,
        *,
        gain_offset: bool = False,
        in_region: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.gain_offset = gain_offset
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
        return with_gain(normal, weight, x.dtype, self.gain_offset)


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
