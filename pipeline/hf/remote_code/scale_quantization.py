"""Loading an export in fewer bits, where it can be."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.quantizers.auto import AutoQuantizationConfig


def with_skips(options: Mapping[str, Any], left: Sequence[str]) -> dict[str, Any]:
    """The arguments of `from_pretrained`, of which a quantisation leaves the modules `left` as they
    are, and no other map, unless it names maps itself.
    """
    changed = dict(options)
    quantization = changed.get("quantization_config")
    if quantization is None:
        return changed
    if isinstance(quantization, dict):
        quantization = AutoQuantizationConfig.from_dict(quantization)
    quantization = copy.copy(quantization)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if getattr(quantization, name, ()) is None:
            # Patterns, as these names are ends of others.
            setattr(quantization, name, [f"^{re.escape(module)}" for module in left])
    changed["quantization_config"] = quantization
    return changed


def quantised_by(found: Any) -> str | None:
    """By what the library has quantised the model that its `from_pretrained` gave, alone or before
    what it says of loading; None: its weights are as they are stored.
    """
    model = found[0] if isinstance(found, tuple) else found
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None
    return type(quantizer.quantization_config).__name__
