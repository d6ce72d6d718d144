"""EXAONE 4: norms after attention and FFN, a norm of each query and key head, layers with windows among global ones."""

from __future__ import annotations

from pipeline.model.families.family import (
    POST_NORM_NAMES,
    Config,
    Family,
    layer_types,
    rotary_of,
    spec_of,
    typed_windows,
)
from pipeline.model.spec import DecoderSpec, LayerKind


def _read(config: Config) -> DecoderSpec:
    rotary, windows = rotary_of(config), typed_windows(config)
    # Where some layers have a window, the global ones have no position embedding.
    mixed = config.sliding_window is not None
    layers = [LayerKind(None if mixed and window is None else rotary, window) for window in windows]
    return spec_of(config, layers, norm_placement="after", query_key_norm="head")


EXAONE4 = Family(("exaone4",), _read, POST_NORM_NAMES, layer_entries=layer_types)
