"""What a folder's config.json takes over from the base's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import BaseModelError
from pipeline.model.from_hf import RESIDUAL_KEY
from pipeline.model.residual import StoredResidual

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of the base as it was downloaded, and untrue of what is made of it.
_NOT_TAKEN_OVER = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "quantization_config")


def base_config(base: Path) -> dict[str, Any]:
    """The base's config.json without what holds for that folder only."""
    path = base / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise BaseModelError(f"{path}: the base is quantized; give the folder of its original weights")
    return {key: value for key, value in config.items() if key not in _NOT_TAKEN_OVER}


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """The ids of the special tokens."""
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def residual_config(residual: StoredResidual) -> dict[str, Any]:
    """What `model.from_hf` finds again when the folder is a base."""
    return {RESIDUAL_KEY: asdict(residual)}


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
