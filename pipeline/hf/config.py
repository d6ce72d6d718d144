"""The architecture of a widened model as the entries of a config.json in the format `scale`, and
back.

`hf/remote_code/configuration_scale.py` declares the same entries, with defaults: exports carry that
file, and this package's types are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.gating.gate import NUMBERS, FittedGate
from pipeline.model.spec import (
    DecoderSpec,
    LayerKind,
    MixtureSpec,
    RotarySpec,
    StoredResidual,
)
from pipeline.open_weights import open_weights_in
from pipeline.scale.plan import ExpansionPlan, Widths
from pipeline.scale_math import GATE_DECAY

_SAME_NAME = (
    "vocab_size",
    "head_dim",
    "norm",
    "norm_eps",
    "max_position_embeddings",
    "gated_ffn",
    "query_key_value_bias",
    "output_bias",
    "ffn_bias",
    "parallel_residual",
    "tie_word_embeddings",
    "norm_placement",
    "gain_offset",
    "rounds_once",
    "query_key_norm",
    "embedding_scale",
    "attention_scale",
    "attention_softcap",
    "output_softcap",
)
"""The fields of a DecoderSpec that config.json has by the same name and as the same value."""


def spec_to_config(spec: DecoderSpec) -> dict[str, Any]:
    """The entries that describe the base. Inverse: `config_to_spec`, but for the family.

    The heads are the base's alone; see `plan_to_config`.
    """
    config: dict[str, Any] = {name: getattr(spec, name) for name in _SAME_NAME}
    config |= asdict(spec.widths)
    config["hidden_act"] = spec.activation
    config["num_hidden_layers"] = spec.num_layers
    config["mixture"] = None if spec.mixture is None else asdict(spec.mixture)

    # A rotary embedding that several layers share is listed once.
    rotary: list[RotarySpec] = []
    config["layer_rotary"] = []
    config["layer_types"] = []
    config["expert_layers"] = []
    config["sliding_window"] = None
    for index, layer in enumerate(spec.layers):
        if layer.rotary is None:
            config["layer_rotary"].append(None)
        else:
            if layer.rotary not in rotary:
                rotary.append(layer.rotary)
            config["layer_rotary"].append(rotary.index(layer.rotary))
        if layer.window is None:
            config["layer_types"].append("full_attention")
        else:
            config["layer_types"].append("sliding_attention")
            config["sliding_window"] = layer.window
        if layer.has_experts:
            config["expert_layers"].append(index)
    config["rotary"] = [asdict(one) for one in rotary]

    config["normed_size"] = None
    config["rest_scale"] = 0.0
    if spec.residual is not None:
        # The base was widened before: its norms count the channels that were added then less.
        config["normed_size"] = spec.residual.normed_size
        config["rest_scale"] = spec.residual.scale
    return config


def config_to_spec(config: Mapping[str, Any], family: str) -> DecoderSpec:
    """The architecture of the base that a config.json describes, without the expansion's heads.

    `family` is the base's, which the config does not name: all families run with the same code.
    """
    layers = []
    for index in range(config["num_hidden_layers"]):
        rotary_index = config["layer_rotary"][index]
        rotary = None
        if rotary_index is not None:
            rotary = _rotary_spec(config["rotary"][rotary_index])
        window = None
        if config["layer_types"][index] == "sliding_attention":
            window = config["sliding_window"]
        layers.append(LayerKind(rotary, window, index in config["expert_layers"]))

    mixture = config["mixture"]
    residual = None
    if config["normed_size"] is not None:
        # Layers without a norm before them read the stream as it is.
        read_unnormed = config["norm_placement"] == "after"
        residual = StoredResidual(config["normed_size"], config["rest_scale"], read_unnormed)
    return DecoderSpec(
        family=family,
        layers=tuple(layers),
        widths=_widths(config),
        activation=config["hidden_act"],
        mixture=None if mixture is None else MixtureSpec(**mixture),
        residual=residual,
        **{name: config[name] for name in _SAME_NAME},
    )


def _rotary_spec(entry: Mapping[str, Any]) -> RotarySpec:
    long_frequencies = entry["long_frequencies"]
    return RotarySpec(
        frequencies=tuple(entry["frequencies"]),
        attention_factor=entry["attention_factor"],
        context=entry["context"],
        long_frequencies=None if long_frequencies is None else tuple(long_frequencies),
    )


def _widths(config: Mapping[str, Any], prefix: str = "") -> Widths:
    return Widths(
        hidden_size=config[f"{prefix}hidden_size"],
        intermediate_size=config[f"{prefix}intermediate_size"],
        num_attention_heads=config[f"{prefix}num_attention_heads"],
        num_key_value_heads=config[f"{prefix}num_key_value_heads"],
    )


def plan_to_config(plan: ExpansionPlan, added_tokens: int = 0) -> dict[str, Any]:
    """The entries that describe the expansion. Inverse: `config_to_plan`, but for how its blocks
    start, and for the tokens with rows of their own.

    `added_tokens`: how many rows of the base's vocabulary are of new tokens.
    """
    config: dict[str, Any] = {}
    # LoRA widens nothing: all its widths are 0.
    for name, value in asdict(plan.expansion or Widths(0, 0, 0, 0)).items():
        config[f"expansion_{name}"] = value
    config["l_fp"] = plan.l_fp
    config["collaborative_modules"] = sorted(plan.collaborative_modules)
    config["routed"] = plan.routed
    config["router_threshold"] = plan.router_threshold
    config["norm_statistics"] = plan.norm
    if plan.own is not None:
        config |= plan.own.config_entries(added_tokens)
    return config


def config_to_plan(
    config: Mapping[str, Any], own_tokens: tuple[int, ...] | None = None
) -> ExpansionPlan:
    """The expansion that a config.json describes; `own_tokens` have rows of their own."""
    expansion = _widths(config, "expansion_")
    return ExpansionPlan(
        expansion=expansion if expansion.hidden_size else None,
        num_layers=config["num_hidden_layers"],
        l_fp=config["l_fp"],
        collaborative_modules=frozenset(config["collaborative_modules"]),
        routed=config["routed"],
        router_threshold=config["router_threshold"],
        norm=config["norm_statistics"],
        own=open_weights_in(config, own_tokens),
    )


def widened_to_config(spec: DecoderSpec, plan: ExpansionPlan) -> dict[str, Any]:
    """The entries that describe a base and its expansion. Inverse: `config_to_widened`."""
    config = spec_to_config(spec) | plan_to_config(plan, spec.added_tokens)
    # Caches are sized by these two entries, so they count all heads.
    for name in ("num_attention_heads", "num_key_value_heads"):
        config[name] += config[f"expansion_{name}"]
    return config


def config_to_widened(
    config: Mapping[str, Any], family: str, own_tokens: tuple[int, ...] | None = None
) -> tuple[DecoderSpec, ExpansionPlan]:
    """The base of that family and its expansion, which a config.json describes.

    `own_tokens`: as in `config_to_plan`.
    """
    base = dict(config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        base[name] -= config[f"expansion_{name}"]
    return config_to_spec(base, family), config_to_plan(config, own_tokens)


def gate_to_config(gate: FittedGate) -> dict[str, Any]:
    """The entries that describe a gate; its tensors, and which ids it opens, are stored beside the
    weights."""
    config: dict[str, Any] = {"gate_decay": GATE_DECAY}
    for name in NUMBERS:
        config[f"gate_{name}"] = getattr(gate, name)
    config["gate_open_ids"] = bool(gate.open_ids)
    return config
