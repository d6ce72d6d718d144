"""The new tokens of a run: their rows in the embedding and in the output projection, and their
columns of the logits.

A run that extends its base's vocabulary trains a row for each new token, with every method. The
base's own matrices stay as they are: the new rows are parameters of their own, and their logits
stand behind the base's.

New *tokens* are counted, new *rows* are their weights: `spec.new_tokens` of them have `new_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.parallel.cross_entropy import IGNORED
from pipeline.parallel.embedding import VOCABULARY
from pipeline.parallel.topology import TensorParallel

Initial = Literal["mean", "last-weighted", "zero"]

# The names of the parameters as checkpoints and expansions store them. Each is [n, D + U]: the
# columns of the base stream, then those of the expansion stream.
NEW_EMBEDDING = "embedding.new_rows.weight"
NEW_OUTPUT = "output.new_rows"


def holds_new_tokens(name: str) -> bool:
    """Whether the parameter of that name holds the rows of new tokens."""
    return name.endswith((NEW_EMBEDDING, NEW_OUTPUT))


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a run, each described by the base's tokens that it replaces.

    Attributes:
        replaces: for each new token, the ids of the base's tokens that spell it.
        initial: how a new row starts: as the mean of those tokens' rows; as their mean with weights
            1, 2, 3, … (the last token counts most, because it is the one from which the next token
            was predicted); or as zero.
        tokenizer: the fingerprint of the extended tokenizer, which says to which token each row
            belongs.
    """

    replaces: Sequence[Sequence[int]]
    initial: Initial = "mean"
    tokenizer: str = ""

    def __len__(self) -> int:
        return len(self.replaces)

    def initial_rows(self, rows: Tensor) -> Tensor:
        """The new tokens' initial rows [n, columns], computed from the base's rows [V, columns]."""
        if self.initial == "zero":
            return rows.new_zeros(len(self), rows.shape[1])
        ids: list[int] = []
        first_of_each: list[int] = []
        weights: list[Tensor] = []
        for replaced in self.replaces:
            first_of_each.append(len(ids))
            ids += replaced
            weight = torch.ones(len(replaced))
            if self.initial == "last-weighted":
                weight = torch.arange(1.0, len(replaced) + 1)
            # In fp32, rounded once at the end: the mean of many 16-bit rows, added up in 16 bits,
            # would lose digits.
            weights.append(weight / weight.sum())
        return F.embedding_bag(
            torch.tensor(ids),
            rows.float(),
            torch.tensor(first_of_each),
            mode="sum",
            per_sample_weights=torch.cat(weights),
        )


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

    def of_tokens(self, tokens: Tensor) -> Tensor:
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
        """The token of each column [N]; the inverse of `of_tokens`."""
        if not self.new_tokens:
            return columns
        rank = columns // self.width
        place = columns % self.width
        base = rank * self.base_width + place
        new = self.vocab_size + rank * self.new_width + place - self.base_width
        return torch.where(place < self.base_width, base, new)
