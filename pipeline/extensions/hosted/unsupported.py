"""What a run on a hosted base cannot have yet, each refused by name before anything is loaded."""

from __future__ import annotations

from pipeline.config.method import Lora, Method, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.model.families import FAMILIES

_OR_NATIVE = "or take a base of a native family (docs/architectures.md)"


def check_hosted_run(config: RunConfig, spec: HostedSpec, tp_size: int) -> None:
    """Checks that a run has only settings that a hosted base can have.

    Raises:
        ConfigError: it has others.
    """
    hosted = f"a hosted base (model_type {spec.family})"
    parallel = config.parallel
    check_hosted_method(config.method, spec)
    if tp_size > 1 or parallel.tp_size > 1:
        raise ConfigError(
            f"parallel.tp_size: expected 1 with {hosted}, found {max(tp_size, parallel.tp_size)}; "
            f"use ZeRO-3, or take a base of a native family: {', '.join(FAMILIES)}"
        )
    if parallel.expert_size > 1:
        raise ConfigError(
            f"parallel.expert_size: expected 1 with {hosted}, found {parallel.expert_size}; use "
            f"ZeRO-3, {_OR_NATIVE}"
        )
    _check_lengths(config, spec, hosted)
    layers = spec.structure.layers
    if config.base_precision != "bf16" and not any(layer.linear_maps for layer in layers):
        raise ConfigError(
            f"base_precision: expected bf16 with {hosted}, which has no linear map that takes "
            f"every token, found {config.base_precision}; remove it, {_OR_NATIVE}"
        )
    if config.compile:
        raise ConfigError(
            f"compile: expected false with {hosted}: compiled layers round otherwise than "
            f"transformers runs them; remove it, {_OR_NATIVE}"
        )
    if config.vocabulary is not None:
        raise ConfigError(
            f"vocabulary: {hosted} takes no new tokens, because its export runs the base's own "
            f"forward pass and generation, which know the base's ids alone; remove it, {_OR_NATIVE}"
        )

    if config.recomputation_keeps != "nothing":
        raise ConfigError(
            f"recomputation_keeps: expected nothing with {hosted}, found "
            f"{config.recomputation_keeps}; remove it, {_OR_NATIVE}"
        )
    _check_gate(config, spec, hosted)


def _check_lengths(config: RunConfig, spec: HostedSpec, hosted: str) -> None:
    """Raises ConfigError where documents of a micro-batch would change each other."""
    longest = spec.independent_context
    if longest is None:
        return
    lengths = {"data": config.data.sequence_length}
    for stage in config.stages:
        if stage.sequence_length is not None:
            lengths[f"stages.{stage.name}"] = stage.sequence_length
    for section, length in lengths.items():
        if length > longest:
            raise ConfigError(
                f"{section}.sequence_length: expected at most {longest} with {hosted}, found "
                f"{length}: in a longer document transformers changes the rotary frequencies of "
                f"the whole micro-batch; use at most {longest}, {_OR_NATIVE}"
            )


def _check_gate(config: RunConfig, spec: HostedSpec, hosted: str) -> None:
    """Raises ConfigError where a gate would read another stream than the exact one of the base."""
    if config.gate is not None and not spec.structure.has_one_stream:
        raise ConfigError(
            f"gate: expected a base with one residual stream, found {hosted} with several; remove "
            f"it, {_OR_NATIVE}"
        )
    method = config.method
    if config.gate is None or not isinstance(method, (ScaleMethod, Lora)):
        return
    is_adapt = isinstance(method, ScaleMethod) and method.variant != "preserve"
    setting = "l_fp" if is_adapt else "open_first_layer"
    first = getattr(method, setting)
    if first is None:  # Preserve without open weights: the base's stream is exact everywhere
        return
    # Without gate.layer the gate reads before layer `first`, or before layer 2 where that is 0.
    if first == 0 or (config.gate.layer or 0) > first:
        raise ConfigError(
            f"gate.layer: expected at most method.{setting}, and that at least 1, with {hosted}, "
            f"whose layers run once; found {setting} {first}, and gate.layer {config.gate.layer}"
        )


def check_hosted_method(method: Method, spec: HostedSpec) -> None:
    """Checks that the method has only settings that a hosted base can have.

    Raises:
        ConfigError: it has others.
    """
    hosted = f"a hosted base (model_type {spec.family})"
    if isinstance(method, Lora):
        if method.target_modules is not None:
            raise ConfigError(
                f"method.target_modules: names maps of native families, and the maps of {hosted} "
                f"have names of their own; remove it: all get an adapter, {_OR_NATIVE}"
            )
        _check_open_weights(method, spec, hosted)
        return
    if not isinstance(method, ScaleMethod):
        raise ConfigError(
            f"method.name: expected scale or lora with {hosted}, whose own weights are frozen, "
            f"found {method.name}; take scale, {_OR_NATIVE}"
        )
    if method.variant == "route":
        raise ConfigError(
            f"method.variant: expected preserve or adapt with {hosted}, found route, whose export "
            f"would need two caches of the base's own; take adapt, {_OR_NATIVE}"
        )
    if method.norm == "base":
        raise ConfigError(
            f"method.norm: expected separate with {hosted}, which has no merged export, found "
            f"base; remove it, {_OR_NATIVE}"
        )
    if method.has_open_weights:
        _check_open_weights(method, spec, hosted)


def _check_open_weights(method: ScaleMethod | Lora, spec: HostedSpec, hosted: str) -> None:
    """Raises ConfigError where the base has no place for open weights."""
    if isinstance(method, Lora):
        first: int | None = method.open_first_layer
        setting = "rank"
        has_low_rank = True
    else:
        first = method.l_fp if method.open_first_layer is None else method.open_first_layer
        setting = "low_rank"
        has_low_rank = method.low_rank is not None
    # A gate, which such weights need, reads one stream; and so do open rows.
    if method.has_open_weights and not spec.structure.has_one_stream:
        raise ConfigError(
            f"method.open_rows, open_gains, low_rank: expected a base with one residual stream, "
            f"found {hosted} with several; remove them, {_OR_NATIVE}"
        )
    layers = spec.structure.layers[first:]
    if has_low_rank and not any(layer.linear_maps for layer in layers):
        raise ConfigError(
            f"method.{setting}: expected linear maps that take every token, found none from layer "
            f"{first} on of {hosted}; remove it, {_OR_NATIVE}"
        )
    if method.open_gains and not any(layer.norms for layer in layers):
        raise ConfigError(
            f"method.open_gains: expected norms with gains, found none from layer {first} on of "
            f"{hosted}; remove it, {_OR_NATIVE}"
        )
