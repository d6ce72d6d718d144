"""The features of a run, each with the settings that ask for it, or with the base that it is.

Nothing here says what goes together: that is asked of the checks (`ask.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.base import BaseCode


@dataclass(frozen=True)
class Base:
    """A small base: the entries of its config.json, and which code computes it."""

    config: Mapping[str, Any]
    code: BaseCode = "native"


@dataclass(frozen=True)
class Feature:
    """Something that a run may have.

    Attributes:
        settings: the settings of it, by dotted path.
        beside: further settings that it needs beside a method, by the method's feature.
        base: the base that it needs, a name of `BASES`; None: any.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    base: str | None = None


DENSE = "dense"
MIXTURE = "mixture"
ADAPT = "adapt"
WITHOUT_GATE = "--without-gate"
"""An option of `scale-cpt convert`: the gate, which training needs, is left out of the export."""

_EXPANSION = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_FIRST_LAYER = {"preserve": {"method.open_first_layer": 1}}
"""Preserve needs to be told where open tokens leave the base's stream."""


def _scale(variant: str, **more: Any) -> Feature:
    values = {"name": "scale", "variant": variant, "expansion": _EXPANSION, **more}
    return Feature({"method": values})


METHODS: Mapping[str, Feature] = {
    "preserve": _scale("preserve"),
    ADAPT: _scale("adapt", l_fp=2),
    "route": _scale("route", l_fp=2),
    "fft": Feature({"method": {"name": "fft"}}),
    "freeze": Feature({"method": {"name": "freeze", "frozen_layers": 2}}),
    "lora": Feature({"method": {"name": "lora", "rank": 4}}),
    "llama_pro": Feature({"method": {"name": "llama_pro", "added_layers": 2}}),
}
"""Methods, and the variants of SCALE."""

SETTINGS: Mapping[str, Feature] = {
    "ZeRO-1": Feature({"deepspeed": "ds_configs/zero1.json"}),
    "ZeRO-2": Feature({"deepspeed": "ds_configs/zero2.json"}),
    "ZeRO-3": Feature({"deepspeed": "ds_configs/zero3.json"}),
    "tensor parallel": Feature({"parallel.tp_size": 2}),
    "sequence parallel": Feature({"parallel.tp_size": 2, "parallel.sequence_parallel": True}),
    "experts over ranks": Feature({"parallel.expert_size": 2}, base=MIXTURE),
    "vocabulary": Feature({"vocabulary": {"folder": "extended_tokenizer"}}),
    "self-generated text": Feature(
        {
            "data.corpora.own": {"role": "self_generated", "sample": {"tokens": 400}},
            "data.replay_loss": "kl",
        }
    ),
    "gate": Feature({"gate": {}}),
    "open rows": Feature({"method.open_rows": {"min_count": 5}, "gate": {}}, beside=_FIRST_LAYER),
    "open gains": Feature({"method.open_gains": True, "gate": {}}, beside=_FIRST_LAYER),
    "low rank": Feature({"method.low_rank": 4, "gate": {}}, beside=_FIRST_LAYER),
    "fp8": Feature({"base_precision": "fp8"}),
    "nf4": Feature({"base_precision": "nf4"}),
    "norm: base": Feature({"method.norm": "base"}),
    "compile": Feature({"compile": True}),
    "recomputing": Feature({"activation_checkpointing": "all"}),
    "asynchronous": Feature({"checkpoints.asynchronous": True}),
    "muon": Feature({"schedule.optimizer": "muon"}),
    "init_expansion": Feature({"init_expansion": "an_expansion"}),
}

OTHERS: Mapping[str, Feature] = {
    "kept products": Feature(
        {"activation_checkpointing": "all", "recomputation_keeps": "products"}
    ),
    "target modules": Feature({"method.target_modules": ["query", "value"]}),
    "from layer 1 on": Feature({"method.open_first_layer": 1}),
    WITHOUT_GATE: Feature(),
}
"""Features that make a row of a table together with others."""

_DENSE: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_DENSE, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 4}
_SEVERAL_STREAMS = {
    "model_type": "gemma3n_text",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 0,
    "head_dim": 16,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}

BASES: Mapping[str, Base] = {
    DENSE: Base(_DENSE),
    MIXTURE: Base(_QWEN3_MOE),
    # A merged export of a run of ours: its last 32 channels are an expansion.
    "widened": Base({**_DENSE, "widened_residual": {"normed_size": 96, "scale": 2.0**-12}}),
    "transformers": Base({**_DENSE, "model_type": "granite"}, "transformers"),
    "several streams": Base({**_DENSE, **_SEVERAL_STREAMS}, "transformers"),
}
"""Bases of which everything is asked."""

FAMILIES: Mapping[str, Base] = {
    "Qwen3": Base({**_DENSE, "model_type": "qwen3", "head_dim": 32}),
    "OLMo 2": Base({**_DENSE, "model_type": "olmo2"}),
    "Gemma 2": Base({**_DENSE, "model_type": "gemma2", "head_dim": 32}),
    "GPT-NeoX": Base({**_DENSE, "model_type": "gpt_neox"}),
    "GLM-4-MoE": Base(
        {
            **{**_DENSE, **_EXPERTS, "model_type": "glm4_moe", "head_dim": 32},
            **{"n_routed_experts": 4, "first_k_dense_replace": 1, "attention_bias": True},
        }
    ),
}
"""Bases whose architecture decides on a format of exports."""

FEATURES: Mapping[str, Feature] = {
    **METHODS,
    **SETTINGS,
    **OTHERS,
    **{name: Feature(base=name) for name in (*BASES, *FAMILIES)},
}


def settings_of(names: Iterable[str]) -> dict[str, Any]:
    """The settings of features, by dotted path, the method first."""
    chosen = list(names)
    settings: dict[str, Any] = {}
    for name in sorted(chosen, key=list(FEATURES).index):
        settings |= FEATURES[name].settings
        for method in METHODS:
            if method in chosen:
                settings |= FEATURES[name].beside.get(method, {})
    return settings


def contradicts(one: str, other: str) -> str | None:
    """The setting of which two features are two values; None: there is none."""
    if one in (*BASES, *FAMILIES) and other in (*BASES, *FAMILIES):
        return "base"
    values = FEATURES[other].settings
    for setting, value in FEATURES[one].settings.items():
        if values.get(setting, value) != value:
            return setting
    return None
