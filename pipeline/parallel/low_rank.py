"""A low-rank map beside a linear map, on one rank's shard. How it is split follows from the map it stands beside:

    Y = W X + s B A X      W: [out, in], A: [rank, in], B: [out, rank]

Where W is split by rows, B is; where it is split by columns, A is. The other factor is held whole by every rank, but
sees that rank's part of the sum alone: its gradient is summed over the ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.parameter import full_shape_of, partition_of, sharded_parameter, shared_by_neighbours
from pipeline.parallel.sharding import REPLICATED
from pipeline.parallel.topology import TensorParallel


class LowRankAdapter(nn.Module):
    """x: [..., in], as W gets it, -> s B A x: [..., out], as W gives it: of row-parallel maps still to be summed.

    `beside` is W, and `scale` is s. A and B are parameters of this module, so that ZeRO-3 gathers the two at once.
    """

    def __init__(self, beside: nn.Parameter, rank: int, *, scale: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.scale = scale
        partition = partition_of(beside)
        out_features, in_features = full_shape_of(beside)
        self.a = sharded_parameter((rank, in_features), partition if partition.dim == 1 else REPLICATED, tp)
        self.b = sharded_parameter((out_features, rank), partition if partition.dim == 0 else REPLICATED, tp)

    def forward(self, x: Tensor) -> Tensor:
        reduced = F.linear(x, shared_by_neighbours(self.a, self.tp))
        return F.linear(reduced * self.scale, shared_by_neighbours(self.b, self.tp))
