"""Gemma 3, text only: a scaled embedding, norms on both sides with gains 1 + weight, windows with a rotary embedding
of their own."""

from __future__ import annotations

from pipeline.model.families.family import (
    LLAMA_NAMES,
    Config,
    Family,
    UnsupportedError,
    layer_types,
    rotary_of,
    spec_of,
    typed_windows,
)
from pipeline.model.spec import DecoderSpec, LayerKind


def _read(config: Config) -> DecoderSpec:
    for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name):
            raise UnsupportedError(f"{name} {getattr(config, name)!r:.80} is not supported; expected null or false")
    biased = bool(config.attention_bias)
    windows = typed_windows(config)
    rotary = {kind: rotary_of(config, kind) for kind in set(config.layer_types)}
    layers = [LayerKind(rotary[kind], window) for kind, window in zip(config.layer_types, windows, strict=True)]
    return spec_of(
        config,
        layers,
        activation=config.hidden_activation,
        norm_placement="both",
        gain_offset=True,
        query_key_norm="head",
        query_key_value_bias=biased,
        output_bias=biased,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=config.query_pre_attn_scalar**-0.5,
    )


GEMMA3 = Family(
    ("gemma3_text",),
    _read,
    names=LLAMA_NAMES
    | {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    layer_entries=layer_types,
    why_not_stock="a Gemma 3 base: it multiplies its embedding by sqrt(hidden_size), and stores gains less 1",
)
