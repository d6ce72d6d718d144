"""The rows of an extended vocabulary, beside the base's: which old pieces each replaces, and its initial value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.expansion_folder import ExpansionFolder
from pipeline.parallel.sharding import fill_whole, full_shape_of
from pipeline.parallel.topology import TensorParallel

if TYPE_CHECKING:
    from pipeline.model.base_folder import BaseFolder

Initial = Literal["mean", "last-weighted", "zero"]
EMBEDDING, OUTPUT = "embedding.new_rows.weight", "output.new_rows"
"""The parameters: [n, D + U] each, the columns of the base stream and then those of the expansion stream."""


@dataclass(frozen=True)
class NewRows:
    """The new pieces of a run, by the old pieces (ids) that each replaces.

    Attributes:
        initial: a new row starts as the mean of the old pieces' rows, as the mean with weights 1, 2, 3, … (the last
            piece counts most, because it is the one from which the next token was predicted), or as zero.
        tokenizer: the fingerprint of the extended tokenizer, which says what piece each row is of.
    """

    replaces: Sequence[Sequence[int]]
    initial: Initial = "mean"
    tokenizer: str = ""

    def __len__(self) -> int:
        return len(self.replaces)

    def of(self, rows: Tensor) -> Tensor:
        """The initial new rows [n, columns], from the base's [V, columns]."""
        if self.initial == "zero":
            return rows.new_zeros(len(self), rows.shape[1])
        weights = [
            torch.arange(1.0, len(old) + 1)
            if self.initial == "last-weighted"
            else torch.ones(len(old))
            for old in self.replaces
        ]
        lengths = torch.tensor([0, *map(len, self.replaces)])
        return F.embedding_bag(
            torch.tensor([piece for old in self.replaces for piece in old]),
            rows.float(),
            lengths.cumsum(0)[:-1],
            mode="sum",
            per_sample_weights=torch.cat([weight / weight.sum() for weight in weights]),
        )


def is_new_row(name: str) -> bool:
    """Whether a parameter holds rows of an extended vocabulary."""
    return name.endswith((EMBEDDING, OUTPUT))


@torch.no_grad()
def load_new_rows(
    model: nn.Module, base: BaseFolder, tp: TensorParallel, expansion: ExpansionFolder | None
) -> None:
    """Sets the new rows of `model` to what `expansion` holds of them, where another run has trained them, or initially.

    The columns of the expansion stream start as the same mean of its embedding, and as zero in the output, like every
    row there.
    """
    if base.new_rows is None:
        return
    for name, parameter in model.named_parameters():
        if not is_new_row(name):
            continue
        rows, columns = full_shape_of(parameter)
        if expansion is not None and name in expansion.names:
            whole = expansion.read(name, (rows, columns))
        else:
            in_embedding = name.endswith(EMBEDDING)
            whole = base.new_rows.of(
                base.read("embedding.base.weight" if in_embedding else "output.base")
            )
            if added := columns - whole.shape[1]:
                up = torch.zeros(rows, added)
                if in_embedding:
                    assert expansion is not None, "an expansion stream without an expansion"
                    shape = (base.spec.vocab_size, added)
                    up = base.new_rows.of(expansion.read("embedding.expansion.weight", shape))
                whole = torch.cat([whole, up], dim=1)
        fill_whole(parameter, tp, whole)
