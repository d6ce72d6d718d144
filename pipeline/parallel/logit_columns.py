"""Which columns of the logits a tensor-parallel rank holds: base's tokens, then new ones."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from pipeline.parallel.cross_entropy import IGNORED
from pipeline.parallel.embedding import VOCABULARY
from pipeline.parallel.topology import TensorParallel


class ColumnRange(TypedDict):
    """Which of all ranks' columns are a rank's, as the functions of `parallel.cross_entropy` take
    it."""

    first: int
    vocab_size: int
    tp: TensorParallel


class LogitColumns:
    """Which columns of the logits a rank holds: its part of the base's vocabulary, then its part of
    the new tokens.

    Both parts are padded to the same length on all ranks (`Partition`). With new tokens, the column
    of a token is not its id: the columns of all ranks, one rank after the other, are base, new,
    base, new, ….

    Attributes:
        first: the id of the first token of the base's vocabulary that this rank holds.
        base_width, new_width: the length of each part, padding included.
        base_count, new_count: the length of each part without padding.
    """

    def __init__(self, vocab_size: int, new_tokens: int, tp: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.new_tokens = new_tokens
        self.tp = tp
        self.first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
        self.base_width = stop - self.first
        self.base_count = max(0, min(stop, vocab_size) - self.first)
        first_new, stop_new = VOCABULARY.bounds(new_tokens, tp.rank, tp.size)
        self.new_width = stop_new - first_new
        self.new_count = max(0, min(stop_new, new_tokens) - first_new)

    @property
    def width(self) -> int:
        """The number of columns that each rank holds, padding included."""
        return self.base_width + self.new_width

    @property
    def range(self) -> ColumnRange:
        """This rank's columns among those of all ranks."""
        if not self.new_tokens:
            return {"first": self.first, "vocab_size": self.vocab_size, "tp": self.tp}
        # Padding lies between the columns, where its logits are set to NEVER; so none is cut off at
        # the end.
        first = self.tp.rank * self.width
        return {"first": first, "vocab_size": self.tp.size * self.width, "tp": self.tp}

    def columns_of(self, tokens: Tensor) -> Tensor:
        """The column of each token [N], counted over the columns of all ranks; IGNORED stays."""
        if not self.new_tokens:
            return tokens
        is_new = tokens >= self.vocab_size
        # Arithmetic alone, no table: IGNORED is negative, and takes part without harm until the
        # last line puts it back.
        index = torch.where(is_new, tokens - self.vocab_size, tokens)
        width = torch.where(is_new, self.new_width, self.base_width)
        rank = index // width
        offset = torch.where(is_new, self.base_width, 0)
        columns = rank * self.width + index % width + offset
        return torch.where(tokens == IGNORED, tokens, columns)

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The token of each column [N]; the inverse of `columns_of`."""
        if not self.new_tokens:
            return columns
        rank = columns // self.width
        place = columns % self.width
        base = rank * self.base_width + place
        new = self.vocab_size + rank * self.new_width + place - self.base_width
        return torch.where(place < self.base_width, base, new)
