"""The width-expanded linear map of SCALE, Eq. 1 of the paper
(https://aclanthology.org/2026.findings-acl.2037/).

                      in      in_up
                   +-------+-------+
    [ y    ]   out |   W   |  W12  |  [ x    ]      W    base                     frozen
    [      ] =     +-------+-------+  [      ]      W12  expansion_to_base        starts at zero
    [ y_up ] out_up|  W21  |  W22  |  [ x_up ]      W21  base_to_expansion
                   +-------+-------+                W22  expansion_to_expansion

Preserve has no W12, so that y is the base model's own in every layer. Adapt has it in the layers
from `l_fp` on.

The two streams x and x_up are separate tensors, and each block is a separate submodule, for three
reasons. The base stream runs the same matrix products as the base model, to the bit. Autograd
builds no graph for W where x depends on no trained parameter. ZeRO-3 gathers W and the new blocks
separately.

On one tensor-parallel rank, every block is a shard: a new block is split over the ranks like W.
tests/scale/test_widened_linear.py compares the four blocks with one dense matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pipeline.open_tokens import ALL_OPEN, OpenTokens
from pipeline.parallel.layers import (
    ColumnParallelLinear,
    ExpertLinear,
    LowRankAdapter,
    RowParallelLinear,
)
from pipeline.parallel.topology import TensorParallel

Streams = tuple[Tensor, Tensor | None]
"""The base stream x: [B, S, D], and the expansion stream x_up: [B, S, U].

x_up is None in a model, or on a path, that has no expansion.
"""


@dataclass(frozen=True)
class Part:
    """One side of a block of a widened map.

    Attributes:
        size: the number of its features.
        units: how many indivisible units they form, heads or single features: the unit of a shard.
    """

    size: int
    units: int


Parts = tuple[Part, Part | None]
"""One side of a widened map: the base's part, and the added part."""


class WidenedLinear(nn.Module):
    """Y = W X + W12 X^up and Y^up = W21 X + W22 X^up, or Y = W X alone without an expansion.

    x: [..., in], x_up: [..., in_up] -> y: [..., out], y_up: [..., out_up].

    Attributes:
        base: W, frozen under SCALE.
        adapter: a low-rank difference of W, by LoRA or for open tokens alone; None without.
        expansion_to_base: W12, in collaborative layers only.
        base_to_expansion: W21.
        expansion_to_expansion: W22.
    """

    kind: type[ColumnParallelLinear] | type[RowParallelLinear]

    def __init__(
        self,
        source: Parts,
        target: Parts,
        *,
        bias: bool,
        collaborative: bool = False,
        tp: TensorParallel,
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
            # The bias of y_up, where the base's map has one, is W21's: one for each row, not for
            # each block.
            self.base_to_expansion = self._block(source[0], target[1], bias)
            self.expansion_to_expansion = self._block(source[1], target[1], False)

    def _block(self, source: Part, target: Part, bias: bool) -> nn.Module:
        # A new block is split over the ranks like W: by its columns, or by its rows.
        split = source if self.kind is RowParallelLinear else target
        return self.kind(source.size, target.size, bias=bias, units=split.units, tp=self.tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        """W12 and the adapter are for open tokens; the y of others is the base's, to the bit."""
        y: Tensor = self.base(x)
        if self.adapter is not None:
            y = open_tokens.add(y, self.adapter, x)
        if self.base_to_expansion is None or self.expansion_to_expansion is None or x_up is None:
            return y, None
        if self.expansion_to_base is not None:
            y = open_tokens.add(y, self.expansion_to_base, x_up)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


def base_maps(model: nn.Module) -> dict[str, nn.Module]:
    """The base's own maps W in all linear maps of `model`, those of experts too, by their path."""
    maps: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, WidenedLinear):
            maps[f"{path}.base"] = module.base
        elif isinstance(module, ExpertLinear):
            maps[path] = module
    return maps


class WidenedColumnLinear(WidenedLinear):
    """The widened query, key, value, gate and up maps.

    Blocks are split by rows; inputs are whole on every rank.
    """

    kind = ColumnParallelLinear


class WidenedRowLinear(WidenedLinear):
    """The widened output and down maps.

    Blocks are split by columns; results are partial sums over the ranks.
    """

    kind = RowParallelLinear
