"""Llama and what differs from it little: Mistral, Qwen2, Qwen3, SmolLM3."""

from __future__ import annotations

from typing import Any

from pipeline.model.families.family import (
    LLAMA_NAMES,
    Config,
    Family,
    UnsupportedError,
    all_biases,
    layer_types,
    rotary_of,
    spec_of,
    typed_windows,
    window_of,
)
from pipeline.model.spec import DecoderSpec, LayerKind


def _llama(config: Config) -> DecoderSpec:
    layers = [LayerKind(rotary_of(config))] * config.num_hidden_layers
    return spec_of(config, layers, **all_biases(config))


def _mistral(config: Config) -> DecoderSpec:
    layer = LayerKind(rotary_of(config), window_of(config))
    return spec_of(config, [layer] * config.num_hidden_layers)


def _qwen2(config: Config) -> DecoderSpec:
    rotary = rotary_of(config)
    layers = [LayerKind(rotary, window) for window in typed_windows(config)]
    return spec_of(config, layers, query_key_value_bias=True)


def _qwen3(config: Config) -> DecoderSpec:
    rotary, biased = rotary_of(config), bool(config.attention_bias)
    layers = [LayerKind(rotary, window) for window in typed_windows(config)]
    return spec_of(config, layers, query_key_norm="head", query_key_value_bias=biased, output_bias=biased)


def _smollm3(config: Config) -> DecoderSpec:
    rotary, rotated = rotary_of(config), config.no_rope_layers
    if not isinstance(rotated, list) or len(rotated) < config.num_hidden_layers:
        raise UnsupportedError(f"no_rope_layers: expected an entry for each layer, found {rotated!r:.80}")
    windows = typed_windows(config)
    if not config.use_sliding_window and any(windows):
        raise UnsupportedError("use_sliding_window: false, but layer_types names layers with a window")
    layers = [LayerKind(rotary if has else None, window) for has, window in zip(rotated, windows, strict=False)]
    return spec_of(config, layers, **all_biases(config))


def _smollm3_layers(spec: DecoderSpec) -> dict[str, Any]:
    return layer_types(spec) | {"no_rope_layers": [int(layer.rotary is not None) for layer in spec.layers]}


LLAMA = Family(("llama",), _llama, LLAMA_NAMES)
MISTRAL = Family(("mistral",), _mistral, LLAMA_NAMES)
# vLLM does not read head_dim from a Qwen2 config.
QWEN2 = Family(("qwen2",), _qwen2, LLAMA_NAMES, layer_entries=layer_types, derives_head_dim=True)
QWEN3 = Family(("qwen3",), _qwen3, LLAMA_NAMES, layer_entries=layer_types)
SMOLLM3 = Family(("smollm3",), _smollm3, LLAMA_NAMES, layer_entries=_smollm3_layers)
