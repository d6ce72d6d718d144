"""How many tokens a first run reads in the hours that it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config.run import RunConfig, parse_config
from pipeline.deepspeed_config import deepspeed_config_of
from pipeline.errors import ConfigError
from pipeline.extensions.first_config.fitting import Fit
from pipeline.extensions.first_config.texts import TextMeasure
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.cpu_speed import cpu_speed
from pipeline.sizing.estimate import Estimator, estimator_of
from pipeline.sizing.meta_device import NotTracedError

HOURS_ON_CPUS = 24.0
"""The hours of a job on CPUs where none are given."""
_FEWEST_STEPS = 20
_PASS = 2
"""FLOPs of a token and parameter in a forward pass."""
_STEP = 3
"""The fewest FLOPs of a token and parameter in training, for a first guess that is not too low:
`within_limit` counts them exactly, and takes steps away."""
_STAGES = 8
_STAGE_S = 15.0
"""Seconds in which a stage of the job loads its libraries and models."""
_MODELS_COMPARED = 3
"""Base, gated model and the model without its gate read the held-out text after training."""
EVALUATED_BYTES = 2**17
"""Bytes of each held-out text that scale-cpt evaluate scores: its default --max-bytes."""
_WRITTEN_AT_A_TIME = 5
"""Documents that the base writes together: a small corpus is written in eight parts."""
_MEMORY_BYTES_PER_S = 8e9
"""About what a processor reads of its memory in a second, which bounds the writing."""


@dataclass(frozen=True)
class TimeLimit:
    """The seconds that a job may take, and whether the user has set them."""

    seconds: float
    given: bool

    @property
    def hours(self) -> float:
        return self.seconds / 3600


def time_limit(hours: float | None, cluster: Cluster) -> TimeLimit | None:
    """The limit of a job; None: it reads its texts as often as is useful."""
    if hours is not None:
        return TimeLimit(3600 * hours, given=True)
    if cluster.on_cpu:
        return TimeLimit(3600 * HOURS_ON_CPUS, given=False)
    return None


def affordable_tokens(
    limit: TimeLimit, parameters: int, flops_per_second: float, cluster: Cluster
) -> int:
    """At least the tokens that training reads within the limit, before the run is known exactly.

    flops_per_second: of a rank.
    """
    flops = limit.seconds * cluster.gpus * flops_per_second
    return max(1, int(flops / (_STEP * parameters)))


def within_limit(
    fit: Fit,
    limit: TimeLimit,
    spec: DecoderSpec,
    cluster: Cluster,
    texts: tuple[TextMeasure, TextMeasure],
) -> Fit:
    """The run with as many of its steps as fit into the limit, beside the job's other stages.

    Raises:
        ConfigError: hardly any step does.
    """
    estimator = _estimator(fit.config, spec, cluster)
    others = other_seconds(fit.config, estimator, texts)
    step_s = _step_seconds(estimator)
    steps = fit.config.schedule.steps
    possible = math.floor((limit.seconds - others) / step_s)
    if possible >= steps:
        return fit
    if possible < _FEWEST_STEPS:
        needed = (others + _FEWEST_STEPS * step_s) / 3600
        raise ConfigError(
            f"--hours: expected {needed:.2g} or more, in which this base makes {_FEWEST_STEPS} "
            f"steps here beside the {others / 3600:.2g} h of the other stages, "
            f"found {limit.hours:g}"
        )
    values = with_steps(fit.values, possible)
    return Fit(parse_config(values, source="the proposed configuration"), values)


def with_steps(values: dict[str, Any], steps: int) -> dict[str, Any]:
    """The settings with fewer steps, divided among its stages as before."""
    schedule = values["schedule"]
    share = steps / schedule["steps"]
    values = {**values, "schedule": {**schedule, "steps": steps}}
    if "stages" in values:
        stages: list[dict[str, Any]] = []
        for stage in values["stages"]:
            stages.append({**stage, "steps": max(1, math.floor(share * stage["steps"]))})
        values["stages"] = stages
        values["schedule"]["steps"] = sum(stage["steps"] for stage in stages)
    return {**values, **rhythm(values["schedule"])}


def rhythm(schedule: dict[str, Any]) -> dict[str, Any]:
    """The sections `validation` and `checkpoints`: validations take a twentieth of the time."""
    steps = schedule["steps"]
    # A sequence of training takes about three times as long as one of a validation, of which there
    # are 21, each with two corpora.
    sequences = steps * schedule["global_batch_size"] * 3 // (20 * 21 * 2)
    return {
        "validation": {
            "every_steps": max(1, steps // 20),
            "max_sequences": max(4, min(64, sequences)),
        },
        "checkpoints": {"every_steps": max(1, steps // 10)},
    }


def other_seconds(
    config: RunConfig, estimator: Estimator, texts: tuple[TextMeasure, TextMeasure]
) -> float:
    """About the seconds of the job's stages other than training, and of its validations."""
    parameters = estimator.parameters.active + estimator.parameters.expansion
    heldout = config.validation.max_sequences * config.data.sequence_length * len(texts)
    validations = 1 + math.ceil(config.schedule.steps / config.validation.every_steps)
    read = validations * heldout
    if config.gate is not None:
        read += _MODELS_COMPARED * heldout
    for text in texts:
        read += round(_MODELS_COMPARED * text.tokens_per_byte * EVALUATED_BYTES)
    seconds = _STAGES * _STAGE_S + _PASS * parameters * read / _serial_speed(estimator)

    for corpus in config.data.corpora.values():
        if corpus.sample is not None:
            # The weights, in fp32 at most, are read once for each token of a few documents.
            bytes_a_token = 4 * estimator.parameters.active / _WRITTEN_AT_A_TIME
            seconds += corpus.sample.tokens * bytes_a_token / _MEMORY_BYTES_PER_S
    return seconds


def _serial_speed(estimator: Estimator) -> float:
    """The FLOP/s of the stages that are one process: with all cores, or on one GPU."""
    cluster = estimator.cluster
    if not cluster.on_cpu:
        return estimator.speed.flops_per_second
    # They compute in the type of the base's files, at worst in fp32.
    return cluster.gpus * cpu_speed(estimator.spec, torch.float32, cluster).flops_per_second


def _estimator(config: RunConfig, spec: DecoderSpec, cluster: Cluster) -> Estimator:
    deepspeed = deepspeed_config_of(config, Layout(cluster.gpus, 1, 1))
    return estimator_of(config, extended_spec(config, spec), deepspeed, cluster)


def _step_seconds(estimator: Estimator) -> float:
    """The seconds of a step, on average over the stages."""
    steps = estimator.config.schedule.steps
    try:
        return estimator.run_seconds(estimator.own_choice) / steps
    except NotTracedError:
        return estimator.rough_seconds() / steps
