"""GPT-NeoX, and with it Pythia: LayerNorm, attention and FFN side by side, query, key and value fused head by head."""

from __future__ import annotations

from pipeline.model.families.family import Config, Family, rotary_of, spec_of
from pipeline.model.spec import DecoderSpec, LayerKind


def _read(config: Config) -> DecoderSpec:
    biased = bool(config.attention_bias)
    return spec_of(
        config,
        [LayerKind(rotary_of(config, partial=True))] * config.num_hidden_layers,
        norm="layernorm",
        norm_eps=config.layer_norm_eps,
        gated_ffn=False,
        query_key_value_bias=biased,
        output_bias=biased,
        ffn_bias=True,
        parallel_residual=bool(config.use_parallel_residual),
    )


GPT_NEOX = Family(
    ("gpt_neox",),
    _read,
    names={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "layers": "gpt_neox.layers.{}",
        "attention_norm": "input_layernorm",
        "attention.query": "attention.query_key_value",
        "attention.key": "attention.query_key_value",
        "attention.value": "attention.query_key_value",
        "attention.output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn.up": "mlp.dense_h_to_4h",
        "ffn.down": "mlp.dense_4h_to_h",
    },
    fused={"attention.query_key_value": ("attention.query", "attention.key", "attention.value")},
    fused_by_head=True,
    why_not_stock=(
        "a GPT-NeoX base: its LayerNorm takes one mean over the residual stream, and its head size follows from it"
    ),
)
