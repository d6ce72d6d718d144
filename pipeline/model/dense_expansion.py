"""The dense expansion beside a mixture of experts: an FFN on both streams that every token takes,
and how it starts.

    h    = act(G21 x + G22 x_up) ⊙ (U21 x + U22 x_up)
    y    = Σ p_e E_e(x) + W12 h
    y_up = W21 y + W22 h

At the start, with W the experts' maps stacked along their inner width, or the shared expert's map
where there is one, and U_k the first left singular vectors of each W:

    G21 = U_kᵀ W_gate,  U21 = U_kᵀ W_up,  W21 = U_kᵀ (of W_down)

SCALE's W21 of a down map, U_kᵀ W_down, would read the inner activations of all experts; y = W_down
h, so U_kᵀ reads y.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.open_tokens import ALL_OPEN, OpenTokens
from pipeline.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from pipeline.parallel.topology import TensorParallel


class AddedColumnLinear(nn.Module):
    """The added rows of a gate or up map: x: [..., D], x_up: [..., U] -> [..., inner]."""

    def __init__(self, streams: tuple[int, int], inner: int, *, tp: TensorParallel) -> None:
        super().__init__()
        size, size_up = streams
        self.base_to_expansion = ColumnParallelLinear(size, inner, bias=False, units=inner, tp=tp)
        self.expansion_to_expansion = ColumnParallelLinear(
            size_up, inner, bias=False, units=inner, tp=tp
        )

    def forward(self, x: Tensor, x_up: Tensor) -> Tensor:
        added: Tensor = self.base_to_expansion(x) + self.expansion_to_expansion(x_up)
        return added


class AddedRowLinear(nn.Module):
    """The added columns of the down map.

    y: [..., D], the experts' sum, and h: [..., inner] -> the changes of both streams. They are
    partial sums over the ranks, and without `base_to_expansion`, which reads the whole y after the
    sum over the ranks.
    """

    def __init__(
        self, inner: int, streams: tuple[int, int], *, collaborative: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        size, size_up = streams
        self.expansion_to_base: nn.Module | None = None
        if collaborative:
            self.expansion_to_base = RowParallelLinear(inner, size, bias=False, units=inner, tp=tp)
        self.base_to_expansion = ReplicatedLinear(size, size_up, tp=tp)
        self.expansion_to_expansion = RowParallelLinear(
            inner, size_up, bias=False, units=inner, tp=tp
        )

    def forward(
        self, y: Tensor, h: Tensor, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> tuple[Tensor, Tensor]:
        if self.expansion_to_base is not None:
            y = open_tokens.add(y, self.expansion_to_base, h)
        return y, self.expansion_to_expansion(h)


def stacked(experts: Tensor, *, by_columns: bool) -> Tensor:
    """The maps of all experts [experts, out, in] as one, on the scale of a single one.

    Their rows follow each other, [experts · out, in]; or with `by_columns` their columns do,
    [out, experts · in].
    """
    if by_columns:
        whole = experts.movedim(0, 1).flatten(1)
    else:
        whole = experts.flatten(0, 1)
    # E matrices stacked have singular values about √E times as large as one of them.
    return whole / len(experts) ** 0.5
