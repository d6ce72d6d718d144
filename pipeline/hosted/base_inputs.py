"""The arguments by which a hosted base reads a batch as this project means it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from pipeline.hosted.documents import document_inputs
from pipeline.hosted.structure import DocumentSeparation
from pipeline.model.paths import TokenBatch


def base_inputs(
    batch: TokenBatch,
    separation: DocumentSeparation,
    config: PretrainedConfig,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Positions and masks for transformers' forward, and no cache; the tokens are not among them.

    Args:
        batch: with one document a row where `separation` asks for it.
        separation: how the base keeps documents apart.
        config: the base's.
        dtype: the type of the base, for its masks.
    """
    positions = batch.positions
    if batch.documents is not None and separation != "one_document":
        assert positions is not None, "packed documents have positions"
        return document_inputs(separation, config, positions, dtype)
    if positions is None or separation == "one_document":
        return {"use_cache": False}
    # Attention crosses documents here. Without a mask, restarting positions would keep it within.
    everything: Tensor = torch.ones_like(batch.tokens)
    return {"use_cache": False, "position_ids": positions, "attention_mask": everything}
