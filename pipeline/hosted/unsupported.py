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
    if config.gate is None or not isinstance(method, ScaleMethod) or method.l_fp is None:
        return
    if method.l_fp == 0 or (config.gate.layer or 0) > method.l_fp:
        raise ConfigError(
            f"gate.layer: expected at most method.l_fp, and that at least 1, with {hosted}, whose "
            f"layers run once; found l_fp {method.l_fp}, and gate.layer {config.gate.layer}"
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
        raise ConfigError(
            f"method.own_rows, own_gains, low_rank: {hosted} has none yet; remove them, "
            f"{_OR_NATIVE}"
        )
