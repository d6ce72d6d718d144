"""The expansion beside a block of the base whose inside is unknown, or a mixture of experts."""

from __future__ import annotations

from torch import Tensor, nn

from .open_tokens import OpenTokens


class AddedColumnMap(nn.Module):
    """x: [..., D], x_up: [..., U] -> [..., inner]."""

    def __init__(self, streams: tuple[int, int], inner: int) -> None:
        """`streams`: (D, U)."""
        super().__init__()
        size, up = streams
        self.base_to_expansion = nn.Linear(size, inner, bias=False)
        self.expansion_to_expansion = nn.Linear(up, inner, bias=False)

    def forward(self, x: Tensor, x_up: Tensor) -> Tensor:
        return self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


class AddedRowMap(nn.Module):
    """y: [..., D], h: [..., inner] -> the changed y, and y_up [..., U]."""

    def __init__(self, streams: tuple[int, int], inner: int, *, collaborative: bool) -> None:
        super().__init__()
        size, up = streams
        self.expansion_to_base = nn.Linear(inner, size, bias=False) if collaborative else None
        self.base_to_expansion = nn.Linear(size, up, bias=False)
        self.expansion_to_expansion = nn.Linear(inner, up, bias=False)

    def forward(self, y: Tensor, h: Tensor, open_tokens: OpenTokens) -> tuple[Tensor, Tensor]:
        if self.expansion_to_base is not None:
            y = open_tokens.add(y, self.expansion_to_base, h)
        return y, self.base_to_expansion(y) + self.expansion_to_expansion(h)
