"""What only open tokens read: low-rank differences of linear maps, and rows of the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_scale import ScaleConfig


class ScaleLowRank(nn.Module):
    """s B A x, what open tokens add to a linear map: x [..., in] -> [..., out]."""

    def __init__(self, size_in: int, size_out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, size_in))
        self.b = nn.Parameter(torch.empty(size_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a) * self.scale, self.b)


class ScaleOwnInput(nn.Module):
    """What open tokens add to x where weights of their own begin: tokens [B, S] -> [B, S, D].

    Tokens that were too rare to learn a row of their own share one row, behind those of the others.
    Where the vocabulary was extended, new tokens have one more, of zeros.
    """

    row_of_token: Tensor

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.rows = nn.Embedding(config.own_rows, config.hidden_size)
        self.register_buffer("row_of_token", own_row_table(config))

    def forward(self, tokens: Tensor) -> Tensor:
        difference: Tensor = self.rows(self.row_of_token[tokens])
        return difference


def own_row_table(config: ScaleConfig) -> Tensor:
    """The own row of every token, [V], yet to be read from the folder.

    Both modules with such rows have one: they may be on different devices.
    """
    return torch.zeros(config.vocab_size, dtype=torch.int32)
