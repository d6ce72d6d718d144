"""Phi-3 and Phi-4: Llama with query, key and value in one map, and gate and up in another."""

from __future__ import annotations

from pipeline.model.families.family import LLAMA_NAMES, Config, Family, rotary_of, spec_of, window_of
from pipeline.model.spec import DecoderSpec, LayerKind

_FUSED = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
}


def _read(config: Config) -> DecoderSpec:
    layer = LayerKind(rotary_of(config, partial=True), window_of(config))
    return spec_of(config, [layer] * config.num_hidden_layers)


PHI3 = Family(
    ("phi3",),
    _read,
    names=LLAMA_NAMES | {part: fused for fused, parts in _FUSED.items() for part in parts},
    fused=_FUSED,
    derives_head_dim=True,
)
