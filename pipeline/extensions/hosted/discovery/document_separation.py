"""Which arguments keep the documents of one row apart in a hosted base, found by trying them.

transformers does so silently or not at all, and differently by type: restarting positions count
only without a mask and a cache, some types leave them out of the mask, and recurrent mixers carry
their state on. So it is tried: whether another first document changes the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.extensions.hosted.discovery.recorded_calls import differs
from pipeline.extensions.hosted.discovery.tiny_copy import FIRST_SPECIAL_TOKEN
from pipeline.extensions.hosted.documents import document_inputs
from pipeline.extensions.hosted.structure import DocumentSeparation

# Windows of the tiny copy are 8 tokens: shorter than the second document, and longer than the
# first, so that the second's window reaches over it.
_LENGTHS = (5, 14, 7)
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RowOfDocuments:
    """A row of several documents, on which ways to keep them apart are tried.

    Attributes:
        parts: the tokens of each, [1, S_i].
        ids: the tokens of the row, [1, S].
        positions: [1, S], 0 at the first token of each document.
    """

    parts: tuple[Tensor, ...]
    ids: Tensor
    positions: Tensor

    def alone(self, tiny: nn.Module) -> Tensor:
        """The logits that each document gets alone, [1, S, V]."""
        logits = [tiny(input_ids=part, use_cache=False).logits for part in self.parts]
        return torch.cat(logits, dim=1)


def row_of_documents() -> RowOfDocuments:
    """A row of three documents of random tokens, the same at each call."""
    parts: list[Tensor] = []
    positions: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for length in _LENGTHS:
        parts.append(torch.randint(20, FIRST_SPECIAL_TOKEN, (1, length), generator=generator))
        positions.append(torch.arange(length)[None])
    return RowOfDocuments(tuple(parts), torch.cat(parts, dim=1), torch.cat(positions, dim=1))


@torch.no_grad()
def find_separation(tiny: PreTrainedModel) -> DocumentSeparation:
    """The first way in which each document of a row gets the logits that it gets alone.

    The ways are tried in the order of `DocumentSeparation`; the last needs nothing.
    """
    row = row_of_documents()
    alone = row.alone(tiny)
    for separation in get_args(DocumentSeparation):
        if separation == "one_document":
            break
        inputs = document_inputs(separation, tiny.config, row.positions, torch.float32)
        if _is_separate(tiny, row.ids, inputs, alone):
            return separation
    return "one_document"


def _is_separate(tiny: nn.Module, ids: Tensor, inputs: dict[str, Any], alone: Tensor) -> bool:
    """Whether the row's logits are those of its documents alone, and stay when the first document
    changes."""
    first = _LENGTHS[0]
    other = ids.clone()
    # Reversed, and then each id becomes its even or odd neighbour: every token changes, and no id
    # leaves the range of ordinary tokens, whose ends are even.
    other[:, :first] = other[:, :first].flip(1) ^ 1
    try:
        logits = tiny(input_ids=ids, **inputs).logits
        changed = tiny(input_ids=other, **inputs).logits
    except Exception:  # noqa: BLE001 - a model that does not take these arguments raises anything
        return False
    if logits.shape != alone.shape:
        return False
    if differs(logits, alone, _TOLERANCE).any():
        return False
    return not differs(changed[:, first:], logits[:, first:], _TOLERANCE).any()
