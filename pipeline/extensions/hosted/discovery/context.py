"""How long the texts of a hosted base may be.

A type names its context in its own way. Beyond the *original* context of a rotary embedding that is
longrope or dynamic, transformers takes the frequencies of all rows of a call by its longest text:
documents of a micro-batch would change each other. No name says for which types, so it is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.extensions.hosted.discovery.recorded_calls import differs
from pipeline.extensions.hosted.discovery.tiny_copy import FIRST_SPECIAL_TOKEN, build_tiny_copy
from pipeline.extensions.hosted.documents import document_inputs
from pipeline.extensions.hosted.structure import DocumentSeparation
from pipeline.extensions.hosted.transformers_model import first_entry

_ORIGINAL = "original_max_position_embeddings"
_CONTEXT = (
    "max_position_embeddings",
    "max_seq_len",  # MPT
    "max_sequence_length",
    "max_target_positions",  # Whisper
    "n_positions",
    "n_ctx",
    "context_length",
    "seq_length",  # BLOOM's checkpoints
)
"""The names that types give to the length of the longest text, an older or rarer one later."""
_SHORT = 12
"""The context of the tiny copy on which documents are tried; one document is longer."""
_LONG = 20
_TOLERANCE = 1e-4


def context_of(config: PretrainedConfig) -> int | None:
    """The longest text of the model; None: no entry of its configuration says so, as of state
    spaces."""
    found = first_entry(config, *_CONTEXT)
    return found if isinstance(found, int) and found > 0 else None


def independent_context(config: PretrainedConfig, separation: DocumentSeparation) -> int | None:
    """Up to which length documents of a micro-batch leave each other alone; None: at any length.

    Args:
        config: the model's.
        separation: how it keeps documents of a row apart.
    """
    originals = list(_original_contexts(config.to_dict()))
    context = context_of(config.get_text_config(decoder=True))
    if context is not None:
        originals.append(context)
    if not originals or not _documents_change_each_other(config, separation):
        return None
    return min(originals)


def _original_contexts(entries: Mapping[str, Any]) -> Iterator[int]:
    """The original contexts in a configuration: of the model, and of each type of layer."""
    for name, value in entries.items():
        if name == _ORIGINAL and isinstance(value, int):
            yield value
        elif isinstance(value, Mapping) and "vision" not in name and "audio" not in name:
            yield from _original_contexts(value)


@torch.no_grad()
def _documents_change_each_other(config: PretrainedConfig, separation: DocumentSeparation) -> bool:
    """Whether a row's logits change with another row, whose document is beyond the context."""
    try:
        tiny = build_tiny_copy(config, context=_SHORT)
        tokens = torch.arange(2 * _LONG).view(2, _LONG) * 5 % (FIRST_SPECIAL_TOKEN - 20) + 20
        short = torch.arange(_LONG) % (_LONG // 2)
        beside_short = _logits(tiny, separation, tokens, torch.stack([short, short]))
        beside_long = _logits(tiny, separation, tokens, torch.stack([short, torch.arange(_LONG)]))
    except Exception:  # noqa: BLE001 - whatever a type raises beyond its context, no text goes there
        return False
    within = slice(0, _LONG // 2)
    moved = differs(beside_long[0, within], beside_short[0, within], _TOLERANCE)
    return bool(moved.any())


def _logits(
    tiny: PreTrainedModel, separation: DocumentSeparation, tokens: Tensor, positions: Tensor
) -> Tensor:
    """The logits of rows of documents, whose first ones are [B, _LONG // 2] at least."""
    if separation == "one_document":
        # A row each, as long as the longest: a short document is followed by padding.
        tokens = tokens[:, : int(positions.max()) + 1]
    inputs = document_inputs(separation, tiny.config, positions, torch.float32)
    logits: Tensor = tiny(input_ids=tokens, **inputs).logits
    return logits
