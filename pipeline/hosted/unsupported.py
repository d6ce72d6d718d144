"""What a run on a hosted base cannot have yet, each refused by name before anything is loaded."""

from __future__ import annotations

from pipeline.config.method import Method, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.hosted.spec import HostedSpec

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
            f"use ZeRO-3, {_OR_NATIVE}"
        )
    if parallel.expert_size > 1:
        raise ConfigError(
            f"parallel.expert_size: expected 1 with {hosted}, found {parallel.expert_size}; use "
            f"ZeRO-3, {_OR_NATIVE}"
        )
    if config.base_precision != "bf16":
        raise ConfigError(
            f"base_precision: expected bf16 with {hosted}, found {config.base_precision}; remove "
            f"it, {_OR_NATIVE}"
        )
    if config.compile:
        raise ConfigError(f"compile: expected false with {hosted}; remove it, {_OR_NATIVE}")
    if config.vocabulary is not None:
        raise ConfigError(f"vocabulary: {hosted} takes no new tokens yet; remove it, {_OR_NATIVE}")

    if config.recomputation_keeps != "nothing":
        raise ConfigError(
            f"recomputation_keeps: expected nothing with {hosted}, found "
            f"{config.recomputation_keeps}; remove it, {_OR_NATIVE}"
        )
    _check_gate(config, spec, hosted)


def _check_gate(config: RunConfig, spec: HostedSpec, hosted: str) -> None:
    """Raises ConfigError where a gate would read another stream than the exact one of the base."""
    if config.gate is not None and not spec.structure.has_one_stream:
        raise ConfigError(
            f"gate: expected a base with one residual stream, found {hosted} with several; remove "
            f"it, {_OR_NATIVE}"
        )
    method = config.method
    if config.gate is None or not isinstance(method, ScaleMethod):
        return
    setting = "own_first_layer" if method.variant == "preserve" else "l_fp"
    first = getattr(method, setting)
    if first is None:  # Preserve without own weights: the base's stream is exact everywhere
        return
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
    if not isinstance(method, ScaleMethod):
        raise ConfigError(
            f"method.name: expected scale with {hosted}, found {method.name}; take scale, "
            f"{_OR_NATIVE}"
        )
    if method.variant == "route":
        raise ConfigError(
            f"method.variant: expected preserve or adapt with {hosted}, found route; take adapt, "
            f"{_OR_NATIVE}"
        )
    if method.norm == "base":
        raise ConfigError(
            f"method.norm: expected separate with {hosted}, which has no merged export, found "
            f"base; remove it, {_OR_NATIVE}"
        )
    if method.has_own_weights:
        _check_own_weights(method, spec, hosted)


def _check_own_weights(method: ScaleMethod, spec: HostedSpec, hosted: str) -> None:
    """Raises ConfigError where the base has no place for weights of open tokens' own."""
    if not spec.structure.has_one_stream:
        raise ConfigError(
            f"method.own_rows, own_gains, low_rank: expected a base with one residual stream, "
            f"found {hosted} with several; remove them, {_OR_NATIVE}"
        )
    first = method.l_fp if method.own_first_layer is None else method.own_first_layer
    layers = spec.structure.layers[first:]
    if method.low_rank is not None and not any(layer.linear_maps for layer in layers):
        raise ConfigError(
            f"method.low_rank: expected linear maps that take every token, found none from layer "
            f"{first} on of {hosted}; remove it, {_OR_NATIVE}"
        )
    if method.own_gains and not any(layer.norms for layer in layers):
        raise ConfigError(
            f"method.own_gains: expected norms with gains, found none from layer {first} on of "
            f"{hosted}; remove it, {_OR_NATIVE}"
        )
