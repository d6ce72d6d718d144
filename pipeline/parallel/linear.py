"""Column- and row-parallel linear maps on one rank's shard.

The collectives stand around a block of several maps, not in their products.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.collectives import counted_once
from pipeline.parallel.parameter import sharded_parameter, shared_by_neighbours
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel


class ColumnParallelLinear(nn.Module):
    """`Y = W X + b`, with the rows of W (and of b) split over the ranks.

    `units` is how many indivisible groups the rows form (heads). x: [..., in] whole, y: [..., out / tp_size].
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        partition = Partition(dim=0, units=units)
        self.weight = sharded_parameter((out_features, in_features), partition, tp)
        self.bias = sharded_parameter((out_features,), partition, tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else shared_by_neighbours(self.bias, self.tp)
        return F.linear(x, shared_by_neighbours(self.weight, self.tp), bias)


class RowParallelLinear(nn.Module):
    """The partial product of `Y = W X`, with the columns of W split over the ranks.

    x: [..., in / tp_size], y: [..., out], still to be summed over the ranks; the bias is in the first rank's part.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((out_features, in_features), Partition(dim=1, units=units), tp)
        self.bias = sharded_parameter((out_features,), Partition(), tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else counted_once(self.bias, self.tp)
        return F.linear(x, shared_by_neighbours(self.weight, self.tp), bias)
