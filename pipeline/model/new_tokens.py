"""The new tokens of a run: their rows in the embedding and in the output projection.

A run that extends its base's vocabulary trains a row for each new token, with every method. The
base's own matrices stay as they are: the new rows are parameters of their own, and their logits
stand behind the base's (`pipeline.parallel.cross_entropy`).

New *tokens* are counted, new *rows* are their weights: `spec.new_tokens` of them have `new_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

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
