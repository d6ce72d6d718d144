"""The dry run: what a run will do on its own layout, and the errors that would stop it; as text and as JSON values."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.checks.door import Opened, faults_of
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, learning_rate, load_config
from pipeline.conversion.formats import describe_formats, why_not
from pipeline.data.corpora import SAMPLER, is_tokenized, made_by, train_folder, unfinished_corpora
from pipeline.data.token_corpus import load_manifest
from pipeline.errors import LayoutError, UserError
from pipeline.files import free_bytes
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.scale.expansion import MANIFEST
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, Cluster, cluster_of
from pipeline.sizing.estimate import Choice, Estimate, Estimator, check_cluster
from pipeline.sizing.memory import (
    Memory,
    Parameters,
    checkpoint_bytes,
    checkpoints_bytes,
    held_bytes,
    most_checkpoints,
    no_room,
)

_LATEST_STEPS = 100
_SPEED = "tokens_per_second_per_gpu"


@dataclass(frozen=True)
class Milestone:
    """The learning rate of the step after `step` completed steps."""

    step: int
    learning_rate: float
    what: str


def milestones(config: RunConfig) -> tuple[Milestone, ...]:
    """The points where the learning-rate schedule changes."""
    schedule = config.schedule
    warmup = math.ceil(schedule.warmup_fraction * schedule.steps)
    decay_start = warmup
    if schedule.decay == "wsd":
        decay_start = max(warmup, schedule.steps - math.ceil(schedule.decay_fraction * schedule.steps))
    points = {0: "first step", warmup: "warm-up ends", decay_start: f"{schedule.decay} decay begins"}
    if warmup == decay_start:
        points[warmup] = f"warm-up ends, {schedule.decay} decay begins"
    points[schedule.steps - 1] = "last step"
    return tuple(Milestone(step, learning_rate(step, schedule), what) for step, what in sorted(points.items()))


def times(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


@dataclass(frozen=True)
class Duration:
    """The time of the remaining steps, without validations and saves; `source` says how it was estimated."""

    steps_done: int
    step_s: float
    left_s: float
    source: str


def duration_of(config: RunConfig, estimate: Estimate | None, cluster: Cluster) -> Duration | None:
    """The duration from the speed in the run folder's metrics, else from the estimate; None without either."""
    lines = [line for line in read_metrics(config.folder / METRICS) if _SPEED in line]
    steps_done = int(lines[-1]["step"]) if lines else 0
    left = max(0, config.schedule.steps - steps_done)
    if lines:
        speed = statistics.median(line[_SPEED] for line in lines[-_LATEST_STEPS:])
        tokens_per_step = config.schedule.global_batch_size * config.data.sequence_length
        step_s = tokens_per_step / (speed * cluster.gpus)
        return Duration(steps_done, step_s, left * step_s, f"{speed:,.0f} tokens/s a rank, measured in {METRICS}")
    if estimate is None or cluster.on_cpu:
        return None
    source = f"estimated for ranks of {cluster.peak_tflops:g} TFLOP/s at MFU {cluster.mfu:g}; see --peak-tflops, --mfu"
    return Duration(0, estimate.step_s, left * estimate.step_s, source)


@dataclass(frozen=True)
class CheckpointPlan:
    """How many checkpoints a run writes, their size, and the disk space for the most that exist at once."""

    folder: str
    written: int
    bytes_each: int
    most_at_once: int
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class CorpusPlan:
    """One corpus of a run.

    `tokens` and `epochs` are None until it is made, and `epochs` also where the run does not read it.
    `validation_sequences` is how many of its held-out sequences each validation reads.
    """

    name: str
    role: str
    tokens: int | None
    epochs: float | None
    validation_sequences: int | None


@dataclass(frozen=True)
class Plan:
    """What a run will do; None where something is missing to know it.

    `faults` are the errors that would stop it, `to_make` the inputs that earlier stages have not made yet, `export` the
    formats in which the model can leave.
    """

    name: str
    folder: str
    steps: int
    tokens_per_step: int
    micro_batches: int | None
    cluster: Cluster
    choice: Choice | None
    dp_size: int | None
    parameters: Parameters | None
    estimate: Estimate | None
    corpora: tuple[CorpusPlan, ...]
    learning_rates: tuple[Milestone, ...]
    checkpoints: CheckpointPlan | None
    validations: int
    duration: Duration | None
    stages: tuple[str, ...]
    export: str | None
    to_make: tuple[str, ...]
    faults: tuple[str, ...]


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> Plan:
    """The plan of `config` on `cluster`; `base_config` is the base's config.json, if its folder is missing.

    Raises:
        ConfigError: a value of the cluster is impossible.
    """
    check_cluster(cluster)
    run = Opened(config, cluster.gpus, base_config)
    faults = faults_of(run)
    estimator, estimate = _estimate(run, cluster, faults)
    checkpoints = _checkpoints(config, estimator, faults) if estimator else None
    to_make = tuple(_to_make(config))
    return Plan(
        name=config.name,
        folder=str(config.folder),
        steps=config.schedule.steps,
        tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
        micro_batches=estimate.micro_batches if estimate else None,
        cluster=cluster,
        choice=estimator.own_choice if estimator else None,
        dp_size=layout[0].dp_size if (layout := run.get("layout")) else None,
        parameters=estimator.parameters if estimator else None,
        estimate=estimate,
        corpora=tuple(_corpora(run)),
        learning_rates=milestones(config),
        checkpoints=checkpoints,
        validations=1 + times(config, config.validation.every_steps),
        duration=duration_of(config, estimate, cluster),
        stages=tuple(_stages(config)),
        export=_export(run),
        to_make=to_make,
        faults=tuple(map(str, faults)),
    )


def _estimate(run: Opened, cluster: Cluster, faults: list[UserError]) -> tuple[Estimator | None, Estimate | None]:
    """The estimate of the run's own layout, if its inputs could be opened; that it does not fit is a fault."""
    spec, layout = run.get("model"), run.get("layout")
    if spec is None or layout is None:
        return None, None
    estimator = Estimator(run.config, spec, layout[1], cluster)
    try:
        estimate = estimator.estimate(estimator.own_choice)
    except UserError as error:
        faults.append(error)
        return estimator, None
    if not estimate.fits(cluster):
        faults.append(
            LayoutError(
                f"memory: a rank needs {estimate.memory.total / GIB:.1f} GiB of the usable "
                f"{cluster.usable_bytes / GIB:.0f}; tools/estimate.py recommends a layout that fits"
            )
        )
    return estimator, estimate


def _checkpoints(config: RunConfig, estimator: Estimator, faults: list[UserError]) -> CheckpointPlan:
    """The plan of the checkpoints; a lack of disk space is a fault."""
    folder = config.folder / "checkpoints"
    needed = max(0, checkpoints_bytes(config, estimator.parameters) - held_bytes(folder))
    free = free_bytes(folder)
    if free < needed:
        faults.append(no_room(folder, needed, free))
    return CheckpointPlan(
        folder=str(folder),
        written=times(config, config.checkpoints.every_steps),
        bytes_each=checkpoint_bytes(estimator.parameters),
        most_at_once=most_checkpoints(config),
        needed_bytes=needed,
        free_bytes=free,
    )


def _corpora(run: Opened) -> Iterator[CorpusPlan]:
    config = run.config
    samples = run.get("samples") if is_tokenized(config.data) else None
    read = config.schedule.steps * config.schedule.global_batch_size
    epochs = samples.training.epochs_after(read) if samples else {}
    for name, corpus in config.data.corpora.items():
        heldout = samples.heldout.get(name) if samples else None
        yield CorpusPlan(
            name=name,
            role=corpus.role,
            tokens=load_manifest(train_folder(config.data, name)).tokens if samples else None,
            epochs=epochs.get(name),
            validation_sequences=None if heldout is None else min(len(heldout), config.validation.max_sequences),
        )


def _stages(config: RunConfig) -> Iterator[str]:
    """The stages of the run, in order."""
    sampled = any(corpus.sample is not None for corpus in config.data.corpora.values())
    wanted = {"sample": sampled, "upscale": isinstance(config.method, ScaleMethod), "gate": config.gate is not None}
    stages = ("tokenize", "sample", "upscale", "train", "gate", "convert", "evaluate")
    return (stage for stage in stages if wanted.get(stage, True))


def _export(run: Opened) -> str | None:
    """The formats in which the trained model can leave; None where that is unknown."""
    config, spec = run.config, run.get("model")
    if spec is None:
        return None
    plan = None
    if isinstance(config.method, ScaleMethod):
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
    return describe_formats(why_not(config.method, plan, spec, gated=config.gate is not None))


def _to_make(config: RunConfig) -> Iterator[str]:
    """The inputs that earlier stages have not made yet."""
    corpora = config.data.corpora
    for tool in sorted({made_by(corpora[name]) for name in unfinished_corpora(config.data)}):
        what = "the text that the base writes" if tool == SAMPLER else "the token corpora"
        yield f"{config.data.folder}: {what} ({tool})"
    if isinstance(config.method, ScaleMethod) and not (config.upscaled_folder / MANIFEST).exists():
        yield f"{config.upscaled_folder}: the initial expansion (tools/upscale.py)"


_UNKNOWN = "unknown: see the errors below"


def as_values(plan: Plan, now: datetime) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, tokens; and when it would end if it started `now`."""
    values = asdict(plan)
    values["tokens"] = plan.steps * plan.tokens_per_step
    if plan.estimate is not None:
        values["estimate"]["memory"]["total"] = plan.estimate.memory.total
        values["estimate"]["fits"] = plan.estimate.fits(plan.cluster)
    if plan.choice is not None:
        values["choice"] = plan.choice._asdict()
    values["ends_at"] = _end(plan.duration, now).isoformat(timespec="minutes") if plan.duration else None
    values["could_start"] = not plan.faults
    return values


def _end(duration: Duration, now: datetime) -> datetime:
    return now + timedelta(seconds=round(duration.left_s))


def as_text(plan: Plan, now: datetime) -> str:
    """The plan as a few dozen lines, with the errors at the end."""
    rows = [("run", f"{plan.name}, in {plan.folder}"), ("layout", _layout(plan))]
    rows += [("parameters", str(plan.parameters or _UNKNOWN)), *_memory(plan)]
    rows += [("batch", f"{plan.tokens_per_step:,} tokens a step, {plan.micro_batches or '?'} micro-batches a rank")]
    rows += [("steps", f"{plan.steps:,}, {plan.steps * plan.tokens_per_step:,} tokens in all")]
    rows += [(f"corpus {corpus.name}", _corpus(corpus)) for corpus in plan.corpora]
    rows += [
        ("learning rate", f"{point.learning_rate:.3g} from step {point.step:,}: {point.what}")
        for point in plan.learning_rates
    ]
    rows += [("checkpoints", line) for line in _checkpoint_lines(plan)]
    rows += [("validation", _validation(plan)), ("duration", _duration(plan, now))]
    rows += [("stages", ", ".join(plan.stages)), ("export", plan.export or _UNKNOWN)]
    rows += [("yet to make", line) for line in plan.to_make]
    rows += [("errors", line) for line in plan.faults or ("none found",)]
    width = max(len(name) for name, _ in rows)
    lines, before = [], ""
    for name, text in rows:
        lines.append(f"{'' if name == before else name:<{width}}  {text}")
        before = name
    return "\n".join(lines)


def _layout(plan: Plan) -> str:
    kind = "CPU processes" if plan.cluster.on_cpu else "GPUs"
    gpus = f"{plan.cluster.gpus} {kind} on {plan.cluster.nodes} node(s)"
    return gpus if plan.choice is None else f"{gpus}: dp {plan.dp_size}, {plan.choice}"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.estimate is None:
        yield "memory a rank", _UNKNOWN
        return
    memory = plan.estimate.memory
    kinds = ", ".join(f"{kind.name} {getattr(memory, kind.name) / GIB:.2f}" for kind in fields(Memory))
    yield "memory a rank", f"{memory.total / GIB:.2f} of {plan.cluster.usable_bytes / GIB:.0f} usable GiB: {kinds}"
    if plan.estimate.host_bytes:
        yield "memory a rank", f"{plan.estimate.host_bytes / GIB:.2f} GiB in its host's memory"


def _corpus(corpus: CorpusPlan) -> str:
    if corpus.tokens is None:
        return f"{corpus.role}, not made yet: the number of epochs is unknown"
    epochs = "not read" if corpus.epochs is None else f"{corpus.epochs:.3g} epochs"
    return f"{corpus.role}, {corpus.tokens:,} tokens, {epochs}"


def _checkpoint_lines(plan: Plan) -> Iterator[str]:
    checkpoints = plan.checkpoints
    if checkpoints is None:
        yield _UNKNOWN
        return
    size, most = checkpoints.bytes_each / 1e9, checkpoints.most_at_once
    yield f"{checkpoints.written:,} of {size:.3g} GB each, at most {most} at once"
    yield f"{checkpoints.needed_bytes / 1e9:.3g} GB more needed, {checkpoints.free_bytes / 1e9:.3g} GB free"


def _validation(plan: Plan) -> str:
    read = [
        f"{corpus.validation_sequences} of {corpus.name}"
        for corpus in plan.corpora
        if corpus.validation_sequences is not None
    ]
    return f"{plan.validations:,} times" + (f", sequences: {', '.join(read)}" if read else "")


def _duration(plan: Plan, now: datetime) -> str:
    if plan.duration is None:
        return "unknown on CPUs until the first steps are measured" if plan.cluster.on_cpu else _UNKNOWN
    duration = plan.duration
    left = f"{plan.steps - duration.steps_done:,} steps of {duration.step_s:.3g} s"
    end = _end(duration, now).strftime("%Y-%m-%d %H:%M")
    return f"{timedelta(seconds=round(duration.left_s))} for {left}, until {end} if it starts now ({duration.source})"


def dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.run` on the cluster of `arguments`. Returns 1 if the run could not start.

    Raises:
        ConfigError: the configuration is invalid.
    """
    config = load_config(arguments.run, arguments.set)
    plan = make_plan(config, cluster_of(arguments), arguments.base_config)
    now = datetime.now().astimezone()
    text = json.dumps(as_values(plan, now), indent=2) if arguments.json else as_text(plan, now)
    sys.stdout.write(text + "\n")
    return 1 if plan.faults else 0
