"""The architectures that can be a base: how each family differs from Llama, and its tensors' names.

docs/architectures.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from pipeline.errors import BaseModelError
from pipeline.model.spec import DecoderSpec, MixtureSpec

Config = Any
"""A configuration of transformers; which attributes it has depends on its class."""
ROUTER = "ffn.base.router"
EXPERTS = "ffn.base.experts."
"""How the names of the modules begin that hold a linear map of every expert of a layer."""


@dataclass(frozen=True)
class HfTensor:
    """The tensor of a Hugging Face folder that holds one of our parameters.

    Attributes:
        name: the tensor's name.
        part: which of its rows, if it holds several linear maps.
        experts: how many tensors there are, one for each expert, whose number takes the place of {}
            in `name`; None: one tensor.
        three_16_bit_rows: whether our parameter has three rows in 16 bits, whose sum the tensor is.
    """

    name: str
    part: FusedPart | None = None
    experts: int | None = None
    three_16_bit_rows: bool = False

    def names(self) -> list[str]:
        """The name of every expert's tensor, in order, or the one name."""
        if self.experts is None:
            return [self.name]
        return [self.name.format(index) for index in range(self.experts)]


@dataclass(frozen=True)
class FusedPart:
    """The rows of one linear map in a fused tensor.

    The tensor has `groups` groups of `group_rows` rows, and in each the map has `rows` rows from
    the row `first` on. `index` is its place among the maps.
    """

    index: int
    groups: int
    group_rows: int
    first: int
    rows: int

    def of(self, fused: Tensor) -> Tensor:
        """The rows of the map in the fused tensor."""
        # One group: query, key and value follow each other (Phi-3). A group a head: they alternate
        # (GPT-NeoX).
        grouped = fused.unflatten(0, (self.groups, self.group_rows))
        return grouped[:, self.first : self.first + self.rows].flatten(0, 1)


def fuse(parts: Iterable[Tensor], groups: int) -> Tensor:
    """The fused tensor of maps [rows, ...]; the inverse of `FusedPart.of`."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Family:
    """The architectures of a `model_type` of transformers.

    Attributes:
        names: the folder's name of each of our modules; "layers" is the prefix of a layer's, with
            its index as {}.
        features: the fields of DecoderSpec in which they differ from a Llama.
        fused: the parts of each tensor that holds several of our linear maps, in order. The rows of
            the parts follow each other, or with `fused_by_head` they alternate head by head.
        unrotated, dense: the layers without position embedding, and without experts where the
            others have them.
        unsupported: the config's entries that must be null or false.
        derives_head_dim: whether transformers or a server takes the size of a head to be
            hidden_size / heads.
        shared_experts: the config's entry with the width of an expert that every token takes, in
            widths of one expert.
        merged_unsupported_reason: why a widened model is not expressible as an ordinary one; None
            if it is.
    """

    model_type: str
    names: Mapping[str, str]
    features: Callable[[Config], dict[str, Any]] = lambda config: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_head: bool = False
    unrotated: Callable[[Config], Collection[int]] = lambda config: ()
    dense: Callable[[Config], Collection[int]] = lambda config: ()
    unsupported: tuple[str, ...] = ()
    derives_head_dim: bool = False
    shared_experts: str | None = None
    merged_unsupported_reason: str | None = None

    def layer_entries(self, spec: DecoderSpec) -> dict[str, Any]:
        """The config's entries that list layers, for a spec with more layers than the folder."""
        layer_types: list[str] = []
        mlp_layer_types: list[str] = []
        has_rotary: list[int] = []
        dense: list[int] = []
        for index, layer in enumerate(spec.layers):
            has_rotary.append(int(layer.rotary is not None))
            if layer.window is None:
                layer_types.append("full_attention")
            else:
                layer_types.append("sliding_attention")
            if layer.has_experts:
                mlp_layer_types.append("sparse")
            else:
                mlp_layer_types.append("dense")
                dense.append(index)
        entries: dict[str, Any] = {
            "layer_types": layer_types,
            "no_rope_layers": has_rotary,  # despite its name, 1 stands for a layer with rotary
            "mlp_layer_types": mlp_layer_types,
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
            "first_k_dense_replace": len(dense),
        }
        declared = CONFIG_MAPPING[self.model_type]
        return {name: value for name, value in entries.items() if hasattr(declared, name)}

    def tensor(self, name: str, spec: DecoderSpec) -> HfTensor:
        """The tensor of a folder that holds the base parameter `name` (ours)."""
        if name == "output.base":
            return HfTensor(f"{self.names['output']}.weight")
        stem, kind = name.rsplit(".", 1)
        stem = stem.removesuffix(".base")
        if not stem.startswith("layers."):
            return HfTensor(f"{self.names[stem]}.{kind}")
        _, index, module = stem.split(".", 2)
        prefix = self.names["layers"].format(index)
        if module == ROUTER and kind == "bias":
            return HfTensor(f"{prefix}.{self.names[f'{ROUTER}.bias']}", three_16_bit_rows=True)
        theirs = self.names[module]
        if module.startswith(EXPERTS) and spec.mixture is not None:
            return HfTensor(f"{prefix}.{theirs}.{kind}", experts=spec.mixture.experts)
        part: FusedPart | None = None
        if theirs in self.fused:
            part = self._part(self.fused[theirs], module, spec)
        return HfTensor(f"{prefix}.{theirs}.{kind}", part)

    def _part(self, parts: Sequence[str], module: str, spec: DecoderSpec) -> FusedPart:
        """Which rows of a fused tensor, of the maps `parts`, are those of `module`."""
        widths = spec.widths
        groups = widths.num_attention_heads if self.fused_by_head else 1
        kv_rows = widths.num_key_value_heads * spec.head_dim
        rows_of = {
            "attention.query": widths.num_attention_heads * spec.head_dim,
            "attention.key": kv_rows,
            "attention.value": kv_rows,
            "ffn.gate": widths.intermediate_size,
            "ffn.up": widths.intermediate_size,
        }
        rows = [rows_of[part] // groups for part in parts]
        index = parts.index(module)
        return FusedPart(index, groups, sum(rows), sum(rows[:index]), rows[index])


def _attention_biases(config: Config) -> dict[str, Any]:
    biased = bool(config.attention_bias)
    return {"query_key_value_bias": biased, "output_bias": biased}


def _all_biases(config: Config) -> dict[str, Any]:
    return {**_attention_biases(config), "ffn_bias": bool(config.mlp_bias)}


def _qwen3(config: Config) -> dict[str, Any]:
    return {"query_key_norm": "head", **_attention_biases(config)}


def _olmo(config: Config) -> dict[str, Any]:
    return {
        "norm_placement": "after",
        "rounds_once": True,
        "query_key_norm": "all",
        **_attention_biases(config),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        "activation": config.hidden_activation,
        "norm_placement": "both",
        "gain_offset": True,
        # transformers rounds this factor to the type of the model.
        "embedding_scale": config.hidden_size**0.5,
        # Not by head_dim: Gemma 2 27B has heads of 128, and a scalar of hidden_size / heads, 144.
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "output_softcap": config.final_logit_softcapping,
        **_attention_biases(config),
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    return {
        "norm": "layernorm",
        "norm_eps": config.layer_norm_eps,
        "gated_ffn": False,
        "ffn_bias": True,
        "parallel_residual": bool(config.use_parallel_residual),
        **_attention_biases(config),
    }


def _mixture(config: Config, experts: int, intermediate_size: int, **features: Any) -> MixtureSpec:
    normalised = bool(getattr(config, "norm_topk_prob", True))
    # Sigmoid scores are balanced by a bias, and transformers has no loss for them.
    if not features.get("sigmoid"):
        features |= {"balance_coefficient": config.router_aux_loss_coef}
    if not 1 <= config.num_experts_per_tok <= experts:
        raise BaseModelError(
            f"num_experts_per_tok: expected 1 to {experts}, found {config.num_experts_per_tok}"
        )
    return MixtureSpec(
        experts, config.num_experts_per_tok, intermediate_size, normalised, **features
    )


def _sigmoid_mixture(config: Config, experts: int, shared_experts: int) -> MixtureSpec:
    """The mixture that DeepSeek-V3 introduced.

    A bias for each expert balances their load, and one expert is shared.

    Raises:
        BaseModelError: experts are chosen within groups.
    """
    if config.n_group != 1:
        raise BaseModelError(
            f"n_group: expected 1: experts are chosen among all, found {config.n_group}"
        )
    return _mixture(
        config,
        experts,
        config.moe_intermediate_size,
        scale=config.routed_scaling_factor,
        sigmoid=True,
        shared_size=shared_experts * config.moe_intermediate_size,
    )


def _olmoe(config: Config) -> dict[str, Any]:
    mixture = _mixture(config, config.num_experts, config.intermediate_size)
    return {"query_key_norm": "all", "mixture": mixture, **_attention_biases(config)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = {"shared_size": config.shared_expert_intermediate_size, "gated": True}
    mixture = _mixture(config, config.num_experts, config.moe_intermediate_size, **shared)
    return {"mixture": mixture, "query_key_value_bias": bool(config.qkv_bias)}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {
        "mixture": _mixture(config, config.num_experts, config.moe_intermediate_size),
        **_qwen3(config),
    }


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {
        "mixture": _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts),
        "query_key_norm": "head" if config.use_qk_norm else "none",
        "query_key_value_bias": bool(config.attention_bias),
    }


def _solar_open(config: Config) -> dict[str, Any]:
    mixture = _sigmoid_mixture(config, config.n_routed_experts, config.n_shared_experts)
    # The width of all experts that a token takes together.
    config.intermediate_size = mixture.top_k * mixture.intermediate_size + mixture.shared_size
    return {"mixture": mixture, "query_key_value_bias": bool(config.attention_bias)}


def _exaone_moe(config: Config) -> dict[str, Any]:
    mixture = _sigmoid_mixture(config, config.num_experts, config.num_shared_experts)
    return {"mixture": mixture, "query_key_norm": "head"}


def _global_layers_of_exaone(config: Config) -> list[int]:
    """Where some layers have a window, the global ones have no position embedding."""
    if config.sliding_window is None:
        return []
    return [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]


def _unrotated_layers_of_smollm(config: Config) -> list[int]:
    return [layer for layer, rotated in enumerate(config.no_rope_layers) if not rotated]


def _dense_layers_of_exaone(config: Config) -> list[int]:
    return [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "dense"]


def _dense_layers_of_qwen(config: Config) -> list[int]:
    dense: list[int] = []
    for layer in range(config.num_hidden_layers):
        has_experts = (layer + 1) % config.decoder_sparse_step == 0
        if not has_experts or layer in config.mlp_only_layers:
            dense.append(layer)
    return dense


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
    f"{EXPERTS}gate": "mlp.experts.{}.gate_proj",
    f"{EXPERTS}up": "mlp.experts.{}.up_proj",
    f"{EXPERTS}down": "mlp.experts.{}.down_proj",
    "ffn.base.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.base.shared.up": "mlp.shared_experts.up_proj",
    "ffn.base.shared.down": "mlp.shared_experts.down_proj",
}
"""The names in most mixtures; a layer without experts has Llama's FFN."""
_POST_NORM_NAMES = _LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
"""The names in architectures whose norms stand after attention and FFN."""
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
    f"{EXPERTS}gate": "block_sparse_moe.experts.{}.w1",
    f"{EXPERTS}up": "block_sparse_moe.experts.{}.w3",
    f"{EXPERTS}down": "block_sparse_moe.experts.{}.w2",
}
_QWEN2_MOE_NAMES = _MIXTURE_NAMES | {
    "ffn.base.shared": "mlp.shared_expert_gate",
    "ffn.base.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.base.shared.up": "mlp.shared_expert.up_proj",
    "ffn.base.shared.down": "mlp.shared_expert.down_proj",
}
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
}
_PHI3_NAMES = _LLAMA_NAMES | {part: fused for fused, parts in _PHI3_FUSED.items() for part in parts}
_WHOLE_HEADS = "its query and key norms take one mean square over all heads, the added ones too"
_GEMMA = "its servers take the embedding for the output too, and widened the two differ"
_NO_SHARED_EXPERT = "it has no shared expert that the expansion's FFN could widen"

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", _LLAMA_NAMES, _all_biases),
        Family("mistral", _LLAMA_NAMES),
        Family("ministral", _LLAMA_NAMES),
        Family(
            "qwen2",
            _LLAMA_NAMES,
            lambda config: {"query_key_value_bias": True},
            derives_head_dim=True,  # vLLM does not read it from a Qwen2 config
        ),
        Family("qwen3", _LLAMA_NAMES, _qwen3),
        Family(
            "smollm3",
            _LLAMA_NAMES,
            _all_biases,
            unrotated=_unrotated_layers_of_smollm,
        ),
        Family("phi3", _PHI3_NAMES, fused=_PHI3_FUSED, derives_head_dim=True),
        Family("olmo2", _POST_NORM_NAMES, _olmo, merged_unsupported_reason=_WHOLE_HEADS),
        Family("olmo3", _POST_NORM_NAMES, _olmo, merged_unsupported_reason=_WHOLE_HEADS),
        Family(
            "exaone4",
            _POST_NORM_NAMES,
            lambda config: {"norm_placement": "after", "query_key_norm": "head"},
            unrotated=_global_layers_of_exaone,
        ),
        Family(
            "gemma2",
            _GEMMA_NAMES,
            _gemma2,
            unsupported=("use_bidirectional_attention",),
            merged_unsupported_reason=_GEMMA,
        ),
        Family(
            "gemma3_text",
            _GEMMA_NAMES,
            lambda config: {**_gemma2(config), "query_key_norm": "head"},
            # transformers declares the softcap of attention, and does not apply it.
            unsupported=("use_bidirectional_attention", "attn_logit_softcapping"),
            merged_unsupported_reason=_GEMMA,
        ),
        Family(
            "qwen2_moe",
            _QWEN2_MOE_NAMES,
            _qwen2_moe,
            dense=_dense_layers_of_qwen,
            merged_unsupported_reason="a sigmoid of its own weights the shared expert",
        ),
        Family(
            "glm4_moe",
            _MIXTURE_NAMES,
            _glm4_moe,
            dense=lambda config: range(config.first_k_dense_replace),
            shared_experts="n_shared_experts",
        ),
        Family("solar_open", _MIXTURE_NAMES, _solar_open, shared_experts="n_shared_experts"),
        Family(
            "exaone_moe",
            _MIXTURE_NAMES | {f"{ROUTER}.bias": "mlp.e_score_correction_bias"},
            _exaone_moe,
            unrotated=_global_layers_of_exaone,
            dense=_dense_layers_of_exaone,
            shared_experts="num_shared_experts",
        ),
        Family(
            "mixtral",
            _MIXTRAL_NAMES,
            lambda config: {
                "mixture": _mixture(config, config.num_local_experts, config.intermediate_size)
            },
            merged_unsupported_reason=_NO_SHARED_EXPERT,
        ),
        Family(
            "olmoe",
            _MIXTURE_NAMES,
            _olmoe,
            unsupported=("clip_qkv",),
            merged_unsupported_reason=_WHOLE_HEADS,
        ),
        Family(
            "qwen3_moe",
            _MIXTURE_NAMES,
            _qwen3_moe,
            dense=_dense_layers_of_qwen,
            merged_unsupported_reason=_NO_SHARED_EXPERT,
        ),
        Family(
            "gpt_neox",
            _GPT_NEOX_NAMES,
            _gpt_neox,
            fused={
                "attention.query_key_value": ("attention.query", "attention.key", "attention.value")
            },
            fused_by_head=True,
            merged_unsupported_reason=(
                "its LayerNorm takes one mean over the residual stream, and its head size follows "
                "from it"
            ),
        ),
    )
}
"""By the `model_type` of config.json, as transformers' AutoConfig understands it."""


def family_of(spec: DecoderSpec) -> Family:
    return FAMILIES[spec.family]


def hf_tensor(name: str, spec: DecoderSpec) -> HfTensor:
    """The tensor of a Hugging Face folder that holds the base parameter `name` (ours)."""
    return family_of(spec).tensor(name, spec)
