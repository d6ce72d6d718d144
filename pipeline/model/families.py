"""The architectures that can be a base: how each family reads transformers' config. docs/architectures.md says how to
add one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pipeline.model.family import (
    EXPERTS,
    GEMMA_NAMES,
    GPT_NEOX_NAMES,
    LLAMA_NAMES,
    MIXTURE_NAMES,
    POST_NORM_NAMES,
    ROUTER,
    Config,
    Family,
    HfTensor,
    UnsupportedError,
    layer_types,
    rotary_of,
    spec_of,
    typed_layers,
    window_of,
)
from pipeline.model.spec import DecoderSpec, LayerKind, MixtureSpec


def _alike(config: Config, window: int | None = None, *, partial: bool = False) -> list[LayerKind]:
    """Layers of one kind."""
    return [LayerKind(rotary_of(config, partial=partial), window)] * config.num_hidden_layers


def _attention_biases(config: Config) -> dict[str, bool]:
    biased = bool(config.attention_bias)
    return {"query_key_value_bias": biased, "output_bias": biased}


def _all_biases(config: Config) -> dict[str, bool]:
    return {**_attention_biases(config), "ffn_bias": bool(config.mlp_bias)}


def _llama(config: Config) -> DecoderSpec:
    return spec_of(config, _alike(config), **_all_biases(config))


def _mistral(config: Config) -> DecoderSpec:
    return spec_of(config, _alike(config, window_of(config)))


def _ministral(config: Config) -> DecoderSpec:
    if config.head_dim is None:
        raise UnsupportedError("head_dim: transformers runs no ministral without it, nor a mistral with layer_types")
    return spec_of(config, typed_layers(config))


def _qwen2(config: Config) -> DecoderSpec:
    return spec_of(config, typed_layers(config), query_key_value_bias=True)


def _qwen3(config: Config) -> DecoderSpec:
    return spec_of(config, typed_layers(config), query_key_norm="head", **_attention_biases(config))


def _smollm3(config: Config) -> DecoderSpec:
    rotated = config.no_rope_layers
    if not isinstance(rotated, list) or len(rotated) < config.num_hidden_layers:
        raise UnsupportedError(f"no_rope_layers: expected an entry for each layer, found {rotated!r:.80}")
    layers = typed_layers(config)
    if not config.use_sliding_window and any(layer.window for layer in layers):
        raise UnsupportedError("use_sliding_window: false, but layer_types names layers with a window")
    layers = [layer if has else LayerKind(None, layer.window) for has, layer in zip(rotated, layers, strict=False)]
    return spec_of(config, layers, **_all_biases(config))


def _smollm3_layers(spec: DecoderSpec) -> dict[str, Any]:
    return layer_types(spec) | {"no_rope_layers": [int(layer.rotary is not None) for layer in spec.layers]}


def _phi3(config: Config) -> DecoderSpec:
    return spec_of(config, _alike(config, window_of(config), partial=True))


def _olmo2(config: Config) -> DecoderSpec:
    features = _attention_biases(config)
    return spec_of(config, _alike(config), norm_placement="after", query_key_norm="all", **features)


def _olmo3(config: Config) -> DecoderSpec:
    layers, features = typed_layers(config, rotary_by_type=True), _attention_biases(config)
    return spec_of(config, layers, norm_placement="after", query_key_norm="all", **features)


def _exaone4(config: Config) -> DecoderSpec:
    return spec_of(config, _exaone_layers(config), norm_placement="after", query_key_norm="head")


def _exaone_layers(config: Config) -> list[LayerKind]:
    layers = typed_layers(config)
    if config.sliding_window is not None:  # where some layers have a window, the global ones have no position embedding
        layers = [layer if layer.window else LayerKind(None) for layer in layers]
    return layers


def _gemma(config: Config, layers: list[LayerKind], **features: Any) -> DecoderSpec:  # noqa: ANN401
    if config.use_bidirectional_attention:
        raise UnsupportedError("use_bidirectional_attention: expected null or false; a decoder reads what came before")
    return spec_of(
        config,
        layers,
        activation=config.hidden_activation,
        norm_placement="both",
        gain_offset=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        output_softcap=config.final_logit_softcapping,
        **_attention_biases(config),
        **features,
    )


def _gemma2(config: Config) -> DecoderSpec:
    return _gemma(config, typed_layers(config))


def _gemma3(config: Config) -> DecoderSpec:
    if config.attn_logit_softcapping:
        raise UnsupportedError("attn_logit_softcapping: transformers does not apply it in a Gemma 3; expected null")
    return _gemma(config, typed_layers(config, rotary_by_type=True), query_key_norm="head")


def _mixture(config: Config, experts: int, intermediate_size: int, **features: Any) -> MixtureSpec:  # noqa: ANN401
    """The mixture of a config.

    Raises:
        UnsupportedError: its sizes are none of a mixture.
    """
    normalised = bool(getattr(config, "norm_topk_prob", True))
    if not features.get("sigmoid"):  # a bias balances those, and transformers has no loss for them
        features |= {"balance_coefficient": getattr(config, "router_aux_loss_coef", None)}
    mixture = MixtureSpec(experts, config.num_experts_per_tok, intermediate_size, normalised, **features)
    for name, size, largest in (
        ("num_experts", experts, _MOST_EXPERTS),
        ("n_group", mixture.groups, experts),
        ("topk_group", mixture.top_groups, mixture.groups),
        ("num_experts_per_tok", mixture.top_k, experts),
        ("moe_intermediate_size", intermediate_size, _WIDEST_EXPERT),
        ("shared_expert_intermediate_size", mixture.shared_size or 1, 2**31),
    ):
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
            raise UnsupportedError(f"{name}: expected a whole number from 1 to {largest}, found {size!r:.80}")
    of_group, rest = divmod(experts, mixture.groups)
    if mixture.groups > 1 and (rest or of_group < 2 or mixture.top_k > of_group * mixture.top_groups):
        raise UnsupportedError(
            f"n_group: {experts} experts in {mixture.groups} groups, of which {mixture.top_groups} are taken, leave no "
            f"{mixture.top_k} for a token"
        )
    for name, factor, least in (
        ("routed_scaling_factor", mixture.scale, math.ulp(0.0)),
        ("router_aux_loss_coef", mixture.balance_coefficient or 0.0, 0.0),
    ):
        if not isinstance(factor, (int, float)) or not least <= factor < math.inf:
            raise UnsupportedError(f"{name}: expected a number {'above' if least else 'from'} 0, found {factor!r:.80}")
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


def _mixtral(config: Config) -> DecoderSpec:
    mixture = _mixture(config, config.num_local_experts, config.intermediate_size)
    return spec_of(config, _with_experts(_alike(config, window_of(config))), mixture=mixture)


def _olmoe(config: Config) -> DecoderSpec:
    if config.clip_qkv is not None:
        raise UnsupportedError(f"clip_qkv: expected null, found {config.clip_qkv!r:.80}")
    mixture = _mixture(config, config.num_experts, config.intermediate_size)
    layers = _with_experts(_alike(config))
    return spec_of(config, layers, query_key_norm="all", mixture=mixture, **_attention_biases(config))


def _qwen2_moe(config: Config) -> DecoderSpec:
    shared = {"shared_size": config.shared_expert_intermediate_size, "gated": True}
    mixture = _mixture(config, config.num_experts, config.moe_intermediate_size, **shared)
    config.sliding_window = config.sliding_window or None
    layers = _with_experts(typed_layers(config), _sparse_layers(config))
    return spec_of(config, layers, mixture=mixture, query_key_value_bias=bool(config.qkv_bias))


def _qwen3_moe(config: Config) -> DecoderSpec:
    mixture = _mixture(config, config.num_experts, config.moe_intermediate_size)
    layers = _with_experts(_alike(config, window_of(config)), _sparse_layers(config))
    return spec_of(config, layers, query_key_norm="head", mixture=mixture, **_attention_biases(config))


def _sparse_layers(config: Config) -> list[int]:
    """Of Qwen's mixtures, the layers that have experts."""
    layers = range(config.decoder_sparse_step - 1, config.num_hidden_layers, config.decoder_sparse_step)
    return [layer for layer in layers if layer not in config.mlp_only_layers]


def _glm4_moe(config: Config) -> DecoderSpec:
    mixture = _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts)
    layers = _with_experts(_alike(config, partial=True), range(config.first_k_dense_replace, config.num_hidden_layers))
    norm = "head" if config.use_qk_norm else "none"
    biased = bool(config.attention_bias)
    return spec_of(config, layers, mixture=mixture, query_key_norm=norm, query_key_value_bias=biased)


def _solar_open(config: Config) -> DecoderSpec:
    mixture = _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts)
    config.intermediate_size = (
        mixture.top_k * mixture.intermediate_size + mixture.shared_size
    )  # of all that a token takes
    layers = _with_experts(_alike(config, partial=True))
    return spec_of(config, layers, mixture=mixture, query_key_value_bias=bool(config.attention_bias))


def _exaone_moe(config: Config) -> DecoderSpec:
    mixture = _sigmoid_mixture(config, config.num_experts, config.num_shared_experts)
    sparse = [index for index, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    return spec_of(config, _with_experts(_exaone_layers(config), sparse), mixture=mixture, query_key_norm="head")


def _with_experts(layers: Sequence[LayerKind], which: Collection[int] | None = None) -> list[LayerKind]:
    """`layers`, of which those of the indices `which`, or all, are mixtures of experts."""
    return [replace(layer, has_experts=which is None or index in which) for index, layer in enumerate(layers)]


def _qwen_entries(spec: DecoderSpec) -> dict[str, Any]:
    """The entries that say which layers of Qwen's mixtures have no experts."""
    return {"mlp_only_layers": _dense_layers(spec), "decoder_sparse_step": 1}


def _dense_layers(spec: DecoderSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if not layer.has_experts]


def _exaone_moe_entries(spec: DecoderSpec) -> dict[str, Any]:
    kinds = ["sparse" if layer.has_experts else "dense" for layer in spec.layers]
    return {**layer_types(spec), "mlp_layer_types": kinds}


def _gpt_neox(config: Config) -> DecoderSpec:
    return spec_of(
        config,
        _alike(config, partial=True),
        norm="layernorm",
        norm_eps=config.layer_norm_eps,
        gated_ffn=False,
        ffn_bias=True,
        parallel_residual=bool(config.use_parallel_residual),
        **_attention_biases(config),
    )


_MOST_EXPERTS, _WIDEST_EXPERT = 2**12, 2**16  # above every mixture there is; all experts are one tensor
_MIXTRAL_NAMES = MIXTURE_NAMES | {
    ROUTER: "block_sparse_moe.gate",
    **{
        f"{EXPERTS}{ours}": f"block_sparse_moe.experts.{{}}.{theirs}"
        for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
}
_QWEN2_MOE_NAMES = {ours: theirs.replace("shared_experts", "shared_expert") for ours, theirs in MIXTURE_NAMES.items()}
_QWEN2_MOE_NAMES["ffn.base.shared"] = "mlp.shared_expert_gate"
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
}
_PHI3_NAMES = LLAMA_NAMES | {part: fused for fused, parts in _PHI3_FUSED.items() for part in parts}
_WHOLE_HEADS = "its query and key norms take one mean square over all heads, the added ones too"
_GEMMA = "its servers take the embedding for the output too, and widened the two differ"
_NO_SHARED_EXPERT = "it has no shared expert that the expansion's FFN could widen"
_GPT_NEOX = "its LayerNorm takes one mean over the residual stream, and its head size follows from it"

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", _llama, LLAMA_NAMES),
        Family("mistral", _mistral, LLAMA_NAMES),
        Family("ministral", _ministral, LLAMA_NAMES, layer_entries=layer_types),
        # vLLM does not read head_dim from a Qwen2 config.
        Family("qwen2", _qwen2, LLAMA_NAMES, layer_entries=layer_types, derives_head_dim=True),
        Family("qwen3", _qwen3, LLAMA_NAMES, layer_entries=layer_types),
        Family("smollm3", _smollm3, LLAMA_NAMES, layer_entries=_smollm3_layers),
        Family("phi3", _phi3, _PHI3_NAMES, fused=_PHI3_FUSED, derives_head_dim=True),
        Family("olmo2", _olmo2, POST_NORM_NAMES, why_not_stock=f"an OLMo 2 base: {_WHOLE_HEADS}"),
        Family(
            "olmo3",
            _olmo3,
            POST_NORM_NAMES,
            layer_entries=layer_types,
            why_not_stock=f"an OLMo 3 base: {_WHOLE_HEADS}",
        ),
        Family("exaone4", _exaone4, POST_NORM_NAMES, layer_entries=layer_types),
        Family("gemma2", _gemma2, GEMMA_NAMES, layer_entries=layer_types, why_not_stock=f"a Gemma 2 base: {_GEMMA}"),
        Family(
            "gemma3_text", _gemma3, GEMMA_NAMES, layer_entries=layer_types, why_not_stock=f"a Gemma 3 base: {_GEMMA}"
        ),
        Family(
            "qwen2_moe",
            _qwen2_moe,
            _QWEN2_MOE_NAMES,
            layer_entries=lambda spec: {**layer_types(spec), **_qwen_entries(spec)},
            why_not_stock="a Qwen2 mixture: a sigmoid of its own weights the shared expert",
        ),
        Family(
            "glm4_moe",
            _glm4_moe,
            MIXTURE_NAMES,
            layer_entries=lambda spec: {"first_k_dense_replace": len(_dense_layers(spec))},
            shared_experts="n_shared_experts",
        ),
        Family("solar_open", _solar_open, MIXTURE_NAMES, shared_experts="n_shared_experts"),
        Family(
            "exaone_moe",
            _exaone_moe,
            MIXTURE_NAMES | {f"{ROUTER}.bias": "mlp.e_score_correction_bias"},
            layer_entries=_exaone_moe_entries,
            shared_experts="num_shared_experts",
        ),
        Family("mixtral", _mixtral, _MIXTRAL_NAMES, why_not_stock=f"a Mixtral base: {_NO_SHARED_EXPERT}"),
        Family("olmoe", _olmoe, MIXTURE_NAMES, why_not_stock=f"an OLMoE base: {_WHOLE_HEADS}"),
        Family(
            "qwen3_moe",
            _qwen3_moe,
            MIXTURE_NAMES,
            layer_entries=_qwen_entries,
            why_not_stock=f"a Qwen3 mixture: {_NO_SHARED_EXPERT}",
        ),
        Family(
            "gpt_neox",
            _gpt_neox,
            GPT_NEOX_NAMES,
            fused={"attention.query_key_value": ("attention.query", "attention.key", "attention.value")},
            fused_by_head=True,
            why_not_stock=f"a GPT-NeoX base: {_GPT_NEOX}",
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
