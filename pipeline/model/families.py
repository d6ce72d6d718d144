"""The architectures that can be a base, and how each family's config differs from a Llama's. docs/architectures.md says
how to add one."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeline.errors import BaseModelError
from pipeline.model.family import (
    EXPERTS,
    ROUTER,
    Config,
    Family,
    HfTensor,
    alike,
    check_number,
    check_size,
    typed_layers,
)
from pipeline.model.spec import DecoderSpec, LayerKind, MixtureSpec

_MOST_EXPERTS, _WIDEST_EXPERT = 2**12, 2**16
"""Above every mixture that there is; all experts are one tensor."""


def _attention_biases(config: Config) -> dict[str, Any]:
    biased = bool(config.attention_bias)
    return {"query_key_value_bias": biased, "output_bias": biased}


def _all_biases(config: Config) -> dict[str, Any]:
    return {**_attention_biases(config), "ffn_bias": bool(config.mlp_bias)}


def _qwen3(config: Config) -> dict[str, Any]:
    return {"query_key_norm": "head", **_attention_biases(config)}


def _ministral_layers(config: Config) -> list[LayerKind]:
    if config.head_dim is None:
        raise BaseModelError("head_dim: transformers runs no ministral without it, nor a mistral with layer_types")
    return typed_layers(config)


def _smollm3_layers(config: Config) -> list[LayerKind]:
    rotated = config.no_rope_layers
    if not isinstance(rotated, list) or len(rotated) < config.num_hidden_layers:
        raise BaseModelError(f"no_rope_layers: expected an entry for each layer, found {rotated!r:.80}")
    layers = typed_layers(config)
    if not config.use_sliding_window and any(layer.window for layer in layers):
        raise BaseModelError("use_sliding_window: false, but layer_types names layers with a window")
    return [layer if has else LayerKind(None, layer.window) for has, layer in zip(rotated, layers, strict=False)]


def _olmo(config: Config) -> dict[str, Any]:
    return {"norm_placement": "after", "query_key_norm": "all", **_attention_biases(config)}


def _exaone_layers(config: Config) -> list[LayerKind]:
    layers = typed_layers(config)
    if config.sliding_window is not None:  # where some layers have a window, the global ones have no position embedding
        layers = [layer if layer.window else LayerKind(None) for layer in layers]
    return layers


def _gemma2(config: Config) -> dict[str, Any]:
    if config.use_bidirectional_attention:
        raise BaseModelError("use_bidirectional_attention: expected null or false; a decoder reads what came before")
    return {
        "activation": config.hidden_activation,
        "norm_placement": "both",
        "gain_offset": True,
        "embedding_scale": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "output_softcap": config.final_logit_softcapping,
        **_attention_biases(config),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    if config.attn_logit_softcapping:
        raise BaseModelError("attn_logit_softcapping: transformers does not apply it in a Gemma 3; expected null")
    return {**_gemma2(config), "query_key_norm": "head"}


def _gpt_neox(config: Config) -> dict[str, Any]:
    return {
        "norm": "layernorm",
        "norm_eps": config.layer_norm_eps,
        "gated_ffn": False,
        "ffn_bias": True,
        "parallel_residual": bool(config.use_parallel_residual),
        **_attention_biases(config),
    }


def _mixture(config: Config, experts: int, intermediate_size: int, **features: Any) -> MixtureSpec:  # noqa: ANN401
    """The mixture of a config."""
    normalised = bool(getattr(config, "norm_topk_prob", True))
    if not features.get("sigmoid"):  # a bias balances those, and transformers has no loss for them
        features |= {"balance_coefficient": getattr(config, "router_aux_loss_coef", None)}
    mixture = MixtureSpec(experts, config.num_experts_per_tok, intermediate_size, normalised, **features)
    check_size("num_experts", experts, _MOST_EXPERTS)
    check_size("n_group", mixture.groups, experts)
    check_size("topk_group", mixture.top_groups, mixture.groups)
    check_size("num_experts_per_tok", mixture.top_k, experts)
    check_size("moe_intermediate_size", intermediate_size, _WIDEST_EXPERT)
    check_size("shared_expert_intermediate_size", mixture.shared_size or 1)
    check_number("routed_scaling_factor", mixture.scale)
    check_number("router_aux_loss_coef", mixture.balance_coefficient or 0.0, may_be_zero=True)
    of_group, rest = divmod(experts, mixture.groups)
    if mixture.groups > 1 and (rest or of_group < 2 or mixture.top_k > of_group * mixture.top_groups):
        raise BaseModelError(
            f"n_group: {experts} experts in {mixture.groups} groups, of which {mixture.top_groups} are taken, leave no "
            f"{mixture.top_k} for a token"
        )
    return mixture


def _sigmoid_mixture(config: Config, experts: int, shared_experts: int) -> MixtureSpec:
    """The mixture that DeepSeek-V3 introduced: a bias for each expert balances their load, and one is shared."""
    return _mixture(
        config,
        experts,
        config.moe_intermediate_size,
        scale=config.routed_scaling_factor,
        sigmoid=True,
        groups=config.n_group,
        top_groups=config.topk_group,
        shared_size=shared_experts * config.moe_intermediate_size,
    )


def _sparse_layers_of_qwen(config: Config) -> list[int]:
    layers = range(config.decoder_sparse_step - 1, config.num_hidden_layers, config.decoder_sparse_step)
    return [layer for layer in layers if layer not in config.mlp_only_layers]


def _mixtral(config: Config) -> dict[str, Any]:
    return {"mixture": _mixture(config, config.num_local_experts, config.intermediate_size)}


def _olmoe(config: Config) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise BaseModelError(f"clip_qkv: expected null, found {config.clip_qkv!r:.80}")
    mixture = _mixture(config, config.num_experts, config.intermediate_size)
    return {"query_key_norm": "all", "mixture": mixture, **_attention_biases(config)}


def _qwen2_moe_layers(config: Config) -> list[LayerKind]:
    config.sliding_window = config.sliding_window or None
    return typed_layers(config)


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = {"shared_size": config.shared_expert_intermediate_size, "gated": True}
    mixture = _mixture(config, config.num_experts, config.moe_intermediate_size, **shared)
    return {"mixture": mixture, "query_key_value_bias": bool(config.qkv_bias)}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {"mixture": _mixture(config, config.num_experts, config.moe_intermediate_size), **_qwen3(config)}


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {
        "mixture": _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts),
        "query_key_norm": "head" if config.use_qk_norm else "none",
        "query_key_value_bias": bool(config.attention_bias),
    }


def _solar_open(config: Config) -> dict[str, Any]:
    mixture = _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts)
    # That of all experts that a token takes.
    config.intermediate_size = mixture.top_k * mixture.intermediate_size + mixture.shared_size
    return {"mixture": mixture, "query_key_value_bias": bool(config.attention_bias)}


def _exaone_moe(config: Config) -> dict[str, Any]:
    mixture = _sigmoid_mixture(config, config.num_experts, config.num_shared_experts)
    return {"mixture": mixture, "query_key_norm": "head"}


_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "output": "lm_head",
    "layers": "model.layers.{}",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
"""The names that most architectures since Llama share."""
_MIXTURE_NAMES = _LLAMA_NAMES | {
    ROUTER: "mlp.gate",
    f"{ROUTER}.bias": "mlp.gate.e_score_correction_bias",
    **{f"{EXPERTS}{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn.base.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
"""Those of most mixtures; a layer without experts has Llama's FFN."""
_POST_NORM_NAMES = _LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
"""Those of architectures whose norms stand after attention and FFN."""
_GEMMA_NAMES = _POST_NORM_NAMES | {"ffn_norm": "pre_feedforward_layernorm"}
_GPT_NEOX_NAMES = {
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
}
_MIXTRAL_NAMES = _MIXTURE_NAMES | {
    ROUTER: "block_sparse_moe.gate",
    **{
        f"{EXPERTS}{ours}": f"block_sparse_moe.experts.{{}}.{theirs}"
        for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
}
_QWEN2_MOE_NAMES = {ours: theirs.replace("shared_experts", "shared_expert") for ours, theirs in _MIXTURE_NAMES.items()}
_QWEN2_MOE_NAMES["ffn.base.shared"] = "mlp.shared_expert_gate"
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
}
_PHI3_NAMES = _LLAMA_NAMES | {part: fused for fused, parts in _PHI3_FUSED.items() for part in parts}
_WHOLE_HEADS = "its query and key norms take one mean square over all heads, the added ones too"
_GEMMA = "its servers take the embedding for the output too, and widened the two differ"
_NO_SHARED_EXPERT = "it has no shared expert that the expansion's FFN could widen"
_TYPES, _QWEN_LISTS = ("layer_types",), ("mlp_only_layers", "decoder_sparse_step")
_windowed = partial(alike, windowed=True)
_partly_rotated = partial(alike, partly_rotated=True)
_rotary_by_type = partial(typed_layers, rotary_by_type=True)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", _LLAMA_NAMES, alike, _all_biases),
        Family("mistral", _LLAMA_NAMES, _windowed),
        Family("ministral", _LLAMA_NAMES, _ministral_layers, layer_lists=_TYPES),
        Family(
            "qwen2",
            _LLAMA_NAMES,
            typed_layers,
            lambda config: {"query_key_value_bias": True},
            layer_lists=_TYPES,
            derives_head_dim=True,  # vLLM does not read it from a Qwen2 config
        ),
        Family("qwen3", _LLAMA_NAMES, typed_layers, _qwen3, layer_lists=_TYPES),
        Family("smollm3", _LLAMA_NAMES, _smollm3_layers, _all_biases, layer_lists=(*_TYPES, "no_rope_layers")),
        Family(
            "phi3",
            _PHI3_NAMES,
            partial(alike, windowed=True, partly_rotated=True),
            fused=_PHI3_FUSED,
            derives_head_dim=True,
        ),
        Family("olmo2", _POST_NORM_NAMES, alike, _olmo, why_not_stock=_WHOLE_HEADS),
        Family("olmo3", _POST_NORM_NAMES, _rotary_by_type, _olmo, layer_lists=_TYPES, why_not_stock=_WHOLE_HEADS),
        Family(
            "exaone4",
            _POST_NORM_NAMES,
            _exaone_layers,
            lambda config: {"norm_placement": "after", "query_key_norm": "head"},
            layer_lists=_TYPES,
        ),
        Family("gemma2", _GEMMA_NAMES, typed_layers, _gemma2, layer_lists=_TYPES, why_not_stock=_GEMMA),
        Family("gemma3_text", _GEMMA_NAMES, _rotary_by_type, _gemma3, layer_lists=_TYPES, why_not_stock=_GEMMA),
        Family(
            "qwen2_moe",
            _QWEN2_MOE_NAMES,
            _qwen2_moe_layers,
            _qwen2_moe,
            sparse_layers=_sparse_layers_of_qwen,
            layer_lists=(*_TYPES, *_QWEN_LISTS),
            why_not_stock="a sigmoid of its own weights the shared expert",
        ),
        Family(
            "glm4_moe",
            _MIXTURE_NAMES,
            _partly_rotated,
            _glm4_moe,
            sparse_layers=lambda config: range(config.first_k_dense_replace, config.num_hidden_layers),
            layer_lists=("first_k_dense_replace",),
            shared_experts="n_shared_experts",
        ),
        Family("solar_open", _MIXTURE_NAMES, _partly_rotated, _solar_open, shared_experts="n_shared_experts"),
        Family(
            "exaone_moe",
            _MIXTURE_NAMES | {f"{ROUTER}.bias": "mlp.e_score_correction_bias"},
            _exaone_layers,
            _exaone_moe,
            sparse_layers=lambda config: [at for at, kind in enumerate(config.mlp_layer_types) if kind == "sparse"],
            layer_lists=(*_TYPES, "mlp_layer_types"),
            shared_experts="num_shared_experts",
        ),
        Family("mixtral", _MIXTRAL_NAMES, _windowed, _mixtral, why_not_stock=_NO_SHARED_EXPERT),
        Family("olmoe", _MIXTURE_NAMES, alike, _olmoe, why_not_stock=_WHOLE_HEADS),
        Family(
            "qwen3_moe",
            _MIXTURE_NAMES,
            _windowed,
            _qwen3_moe,
            sparse_layers=_sparse_layers_of_qwen,
            layer_lists=_QWEN_LISTS,
            why_not_stock=_NO_SHARED_EXPERT,
        ),
        Family(
            "gpt_neox",
            _GPT_NEOX_NAMES,
            _partly_rotated,
            _gpt_neox,
            fused={"attention.query_key_value": ("attention.query", "attention.key", "attention.value")},
            fused_by_head=True,
            why_not_stock="its LayerNorm takes one mean over the residual stream, and its head size follows from it",
        ),
    )
}
"""By the `model_type` of config.json, as transformers' AutoConfig understands it."""


def family_of(spec: DecoderSpec) -> Family:
    """The family of an architecture."""
    return FAMILIES[spec.family]


def hf_tensor(name: str, spec: DecoderSpec) -> HfTensor:
    """The tensor of a Hugging Face folder that holds the base parameter `name` (ours)."""
    return family_of(spec).tensor(name, spec)
