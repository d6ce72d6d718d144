"""Which arguments keep the documents of one row apart in a hosted base, found by trying them.

transformers does so silently or not at all, and differently by type: restarting positions count
only without a mask and a cache, some types leave them out of the mask, and recurrent mixers carry
their state on. So it is tried: whether another first document changes the second.
"""

from __future__ import annotations

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


@torch.no_grad()
def find_separation(tiny: PreTrainedModel) -> DocumentSeparation:
    """The first way in which each document of a row gets the logits that it gets alone.

    The ways are tried in the order of `DocumentSeparation`; the last needs nothing.
    """
    parts: list[Tensor] = []
    positions: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for length in _LENGTHS:
        parts.append(torch.randint(20, FIRST_SPECIAL_TOKEN, (1, length), generator=generator))
        positions.append(torch.arange(length)[None])
    alone: list[Tensor] = []
    for part in parts:
        alone.append(tiny(input_ids=part, use_cache=False).logits)
    ids = torch.cat(parts, dim=1)
    for separation in get_args(DocumentSeparation):
        if separation == "one_document":
            break
        inputs = document_inputs(
            separation, tiny.config, torch.cat(positions, dim=1), torch.float32
        )
        if _is_separate(tiny, ids, inputs, torch.cat(alone, dim=1)):
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
