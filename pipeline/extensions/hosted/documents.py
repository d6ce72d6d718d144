"""The arguments by which a hosted base reads a batch, and keeps the documents of a row apart.

The tokens are not among them. How a base keeps documents apart is found beforehand, by
`pipeline.extensions.hosted.discovery.document_separation`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from pipeline.extensions.hosted.base_attention import ROWS, AttentionRows
from pipeline.extensions.hosted.structure import DocumentSeparation
from pipeline.model.paths import TokenBatch


def base_inputs(
    batch: TokenBatch,
    separation: DocumentSeparation,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    by_kernels: bool,
) -> dict[str, Any]:
    """Positions and masks for transformers' forward, and no cache; the tokens are not among them.

    Args:
        batch: with one document a row where `separation` asks for it.
        separation: how the base keeps documents apart.
        config: the base's.
        dtype: the type of the base, for its masks.
        by_kernels: whether the base attends by kernels that need no masks (`base_attention`).
    """
    if by_kernels:
        return kernel_inputs(batch, separation)
    positions = batch.positions
    if batch.documents is not None and separation != "one_document":
        assert positions is not None, "packed documents have positions"
        return document_inputs(separation, config, positions, dtype)
    if positions is None or separation == "one_document":
        return {"use_cache": False}
    # Attention crosses documents here. Without a mask, restarting positions would keep it within.
    everything: Tensor = torch.ones_like(batch.tokens)
    return {"use_cache": False, "position_ids": positions, "attention_mask": everything}


def kernel_inputs(batch: TokenBatch, separation: DocumentSeparation) -> dict[str, Any]:
    """The arguments of a forward pass whose attention is by kernels: positions, and no masks."""
    inputs: dict[str, Any] = {"use_cache": False}
    inputs[ROWS] = AttentionRows(batch.tokens, batch.documents)
    if batch.positions is not None:
        inputs["position_ids"] = _position_ids(batch.positions, separation)
    return inputs


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
    inputs["position_ids"] = _position_ids(positions, separation)
    if separation == "mask":
        inputs["attention_mask"] = _additive(_visible(positions, None), dtype)
    elif separation == "layer_masks":
        config = config.get_text_config()
        window = getattr(config, "sliding_window", None)
        inputs["attention_mask"] = {
            "full_attention": _additive(_visible(positions, None), dtype),
            "sliding_attention": _additive(_visible(positions, window), dtype),
        }
    return inputs


def _position_ids(positions: Tensor, separation: DocumentSeparation) -> Tensor:
    """The positions [B, S] as a model takes them."""
    if separation == "four_positions":
        return positions.expand(4, *positions.shape)
    return positions


def _visible(positions: Tensor, window: int | None) -> Tensor:
    """[B, 1, S, S]: which tokens of its document a token attends to, itself and `window` - 1 at
    most before it."""
    # Numbers the documents of a row: each begins at position 0.
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
