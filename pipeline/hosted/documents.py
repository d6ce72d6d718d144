"""How several documents in one row are kept apart in a hosted base.

transformers does so silently or not at all, and differently by type: restarting positions count
only without a mask and a cache, some types leave them out of the mask, and recurrent mixers carry
their state on. So it is tried: whether another first document changes the second.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.hosted.calls import differs
from pipeline.hosted.structure import DocumentSeparation
from pipeline.hosted.twin import FIRST_SPECIAL_TOKEN

# Windows of the twin are 8 tokens: shorter than the second document, and longer than the first,
# so that the second's window reaches over it.
_LENGTHS = (5, 14, 7)
_TOLERANCE = 1e-4


def document_inputs(
    separation: DocumentSeparation,
    config: PretrainedConfig,
    positions: Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The arguments of a model's forward pass, beside `input_ids`, that keep documents apart.

    Args:
        separation: how the model does it.
        config: the model's, or that of its text part.
        positions: [B, S], 0 at the first token of each document.
        dtype: of the model, for its additive masks.
    """
    inputs: dict[str, Any] = {"use_cache": False}
    if separation == "one_document":
        return inputs
    inputs["position_ids"] = positions
    if separation == "four_positions":
        inputs["position_ids"] = positions.expand(4, *positions.shape)
    elif separation == "mask":
        inputs["attention_mask"] = _additive(_visible(positions, None), dtype)
    elif separation == "layer_masks":
        config = config.get_text_config()
        window = getattr(config, "sliding_window", None)
        inputs["attention_mask"] = {
            "full_attention": _additive(_visible(positions, None), dtype),
            "sliding_attention": _additive(_visible(positions, window), dtype),
        }
    return inputs


def _visible(positions: Tensor, window: int | None) -> Tensor:
    """[B, 1, S, S]: which tokens of its document a token attends to, itself and `window` - 1 at
    most before it."""
    documents = (positions == 0).cumsum(-1)
    place = torch.arange(positions.shape[1], device=positions.device)
    distance = place[:, None] - place[None]
    visible = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    return visible[:, None]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, else the lowest number: eager attention adds it to the scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


@torch.no_grad()
def find_separation(twin: PreTrainedModel) -> DocumentSeparation:
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
        alone.append(twin(input_ids=part, use_cache=False).logits)
    ids = torch.cat(parts, dim=1)
    for separation in get_args(DocumentSeparation):
        if separation == "one_document":
            break
        inputs = document_inputs(
            separation, twin.config, torch.cat(positions, dim=1), torch.float32
        )
        if _is_separate(twin, ids, inputs, torch.cat(alone, dim=1)):
            return separation
    return "one_document"


def _is_separate(twin: nn.Module, ids: Tensor, inputs: dict[str, Any], alone: Tensor) -> bool:
    """Whether the row's logits are those of its documents alone, and stay when the first document
    changes."""
    other = ids.clone()
    first = _LENGTHS[0]
    other[:, :first] = other[:, :first].flip(1) + 1 - 2 * (other[:, :first].flip(1) % 2)
    try:
        logits = twin(input_ids=ids, **inputs).logits
        changed = twin(input_ids=other, **inputs).logits
    except Exception:  # noqa: BLE001 - a model that does not take these arguments raises anything
        return False
    if logits.shape != alone.shape:
        return False
    if differs(logits, alone, _TOLERANCE).any():
        return False
    return not differs(changed[:, first:], logits[:, first:], _TOLERANCE).any()
