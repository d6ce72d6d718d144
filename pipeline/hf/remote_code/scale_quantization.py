"""Loading an export in fewer bits, where it can be."""

from __future__ import annotations

from typing import Any


def quantised_by(found: Any) -> str | None:
    """By what the library has quantised the model that its `from_pretrained` gave, alone or before
    what it says of loading; None: its weights are as they are stored.
    """
    model = found[0] if isinstance(found, tuple) else found
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None
    return type(quantizer.quantization_config).__name__
