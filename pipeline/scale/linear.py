"""The width-expanded linear maps (paper, Eq. 1), on one rank's shard.

    [ Y    ]   [ W    W12 ] [ X    ]
    [ Y^up ] = [ W21  W22 ] [ X^up ]

The two streams stay two tensors, and each block is a submodule of its own. So the base stream runs the very products
that the base model runs; autograd builds nothing for W where X depends on no trained parameter; and ZeRO-3 gathers W
and the new blocks apart. How a new block is split follows from the kind of its base layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pipeline.parallel.linear import ColumnParallelLinear, RowParallelLinear
from pipeline.parallel.low_rank import LowRankAdapter
from pipeline.parallel.topology import TensorParallel

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
