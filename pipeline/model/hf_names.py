"""Our parameter names beside Hugging Face's, for both families."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.model.spec import DecoderSpec

_LLAMA = {
    "embedding.base": "model.embed_tokens",
    "final_norm.base": "model.norm",
    "output.base": "lm_head",
}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT_NEOX = {
    "embedding.base": "gpt_neox.embed_in",
    "final_norm.base": "gpt_neox.final_layer_norm",
    "output.base": "embed_out",
}
_GPT_NEOX_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "attention.query_key_value",
    "attention.key": "attention.query_key_value",
    "attention.value": "attention.query_key_value",
    "attention.output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn.up": "mlp.dense_h_to_4h",
    "ffn.down": "mlp.dense_4h_to_h",
}
FUSED_PARTS = ("attention.query", "attention.key", "attention.value")


@dataclass(frozen=True)
class HfTensor:
    """A tensor in a Hugging Face folder. Where query, key and value are one tensor, `fused_part` says which is meant:
    its rows are laid out as [heads, 3, head_dim]."""

    name: str
    fused_part: int | None = None


def hf_tensor(name: str, spec: DecoderSpec) -> HfTensor:
    """Where the base parameter `name` (ours) lies in a Hugging Face folder."""
    if name == "output.base":
        return HfTensor(f"{_whole(spec)['output.base']}.weight")
    stem, kind = name.rsplit(".", 1)
    if stem in _whole(spec):
        return HfTensor(f"{_whole(spec)[stem]}.{kind}")
    _, index, module = stem.removesuffix(".base").split(".", 2)
    if spec.family == "llama":
        return HfTensor(f"model.layers.{index}.{_LLAMA_LAYER[module]}.{kind}")
    part = FUSED_PARTS.index(module) if module in FUSED_PARTS else None
    return HfTensor(f"gpt_neox.layers.{index}.{_GPT_NEOX_LAYER[module]}.{kind}", part)


def _whole(spec: DecoderSpec) -> dict[str, str]:
    return _LLAMA if spec.family == "llama" else _GPT_NEOX
