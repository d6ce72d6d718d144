"""The dry run: what a run will do on its own layout, and the errors that would stop it; as text and as JSON values."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.checks.door import Opened, faults_of
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.formats import describe_formats, why_not
from pipeline.data.corpora import is_tokenized, train_folder, unfinished_corpora
from pipeline.data.token_corpus import MANIFEST as CORPUS_MANIFEST
from pipeline.data.token_corpus import load_manifest
from pipeline.errors import LayoutError, UserError
from pipeline.files import free_bytes
from pipeline.scale.expansion import MANIFEST
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, Cluster, cluster_of
from pipeline.sizing.estimate import Choice, Estimate, Estimator
from pipeline.sizing.memory import (
    Memory,
    Parameters,
    checkpoint_bytes,
    checkpoints_bytes,
    held_bytes,
    most_checkpoints,
    no_room,
)


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

    `tokens` and `epochs` are None until it is made, and `epochs` is 0 where the run does not read it.
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
    checkpoints: CheckpointPlan | None
    validations: int
    duration_s: float | None
    stages: tuple[str, ...]
    export: str | None
    to_make: tuple[str, ...]
    faults: tuple[str, ...]


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> Plan:
    """The plan of `config` on `cluster`; `base_config` is the base's config.json, if its folder is missing."""
    run = Opened(config, cluster.gpus, base_config)
    faults = faults_of(run)
    estimator, estimate = _estimate(run, cluster, faults)
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
        checkpoints=_checkpoints(config, estimator, faults) if estimator else None,
        validations=1 + _times(config, config.validation.every_steps),
        duration_s=config.schedule.steps * estimate.step_s if estimate and not cluster.on_cpu else None,
        stages=tuple(_stages(config)),
        export=_export(run),
        to_make=tuple(_to_make(config)),
        faults=tuple(map(str, faults)),
    )


def _times(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


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
                f"{cluster.usable_bytes / GIB:.0f}; scale-cpt estimate recommends a layout that fits"
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
        written=_times(config, config.checkpoints.every_steps),
        bytes_each=checkpoint_bytes(estimator.parameters),
        most_at_once=most_checkpoints(config),
        needed_bytes=needed,
        free_bytes=free,
    )


def _corpora(run: Opened) -> Iterator[CorpusPlan]:
    data, config = run.config.data, run.config
    samples = run.get("samples") if is_tokenized(data) else None
    read = config.schedule.steps * config.schedule.global_batch_size
    epochs = samples.training.epochs_after(read) if samples else {}
    for name, corpus in data.corpora.items():
        folder = train_folder(data, name)
        tokens = load_manifest(folder).tokens if (folder / CORPUS_MANIFEST).exists() else None
        if samples is None and tokens:  # others are not made yet: as if no corpus came to its end
            weights = sum(other.weight for other in data.corpora.values() if other.role == corpus.role)
            share = data.fractions.get(corpus.role, 1 - sum(data.fractions.values())) * corpus.weight / weights
            epochs[name] = read * share * data.sequence_length / tokens
        heldout = samples.heldout.get(name) if samples else None
        yield CorpusPlan(
            name=name,
            role=corpus.role,
            tokens=tokens,
            epochs=None if tokens is None else epochs.get(name, 0.0),
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
    unfinished = [config.data.corpora[name] for name in unfinished_corpora(config.data)]
    if any(corpus.sample is None for corpus in unfinished):
        yield f"{config.data.folder}: the token corpora (scale-cpt tokenize)"
    if any(corpus.sample is not None for corpus in unfinished):
        yield f"{config.data.folder}: the text that the base writes (scale-cpt sample)"
    if isinstance(config.method, ScaleMethod) and not (config.upscaled_folder / MANIFEST).exists():
        yield f"{config.upscaled_folder}: the initial expansion (scale-cpt upscale)"


_UNKNOWN = "unknown: see the errors below"


def as_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, tokens."""
    values = asdict(plan)
    values["tokens"] = plan.steps * plan.tokens_per_step
    if plan.estimate is not None:
        values["estimate"]["memory"]["total"] = plan.estimate.memory.total
        values["estimate"]["fits"] = plan.estimate.fits(plan.cluster)
    if plan.choice is not None:
        values["choice"] = plan.choice._asdict()
    values["could_start"] = not plan.faults
    return values


def as_text(plan: Plan) -> str:
    """The plan as a few dozen lines, with the errors at the end."""
    rows = list(_rows(plan))
    width = max(len(name) for name, _ in rows)
    lines, before = [], ""
    for name, text in rows:
        lines.append(f"{'' if name == before else name:<{width}}  {text}")
        before = name
    return "\n".join(lines)


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """The lines of the plan, each under a name."""
    cluster, estimate, saved = plan.cluster, plan.estimate, plan.checkpoints
    yield "run", f"{plan.name}, in {plan.folder}"
    ranks = f"{cluster.gpus} {'CPU processes' if cluster.on_cpu else 'GPUs'} on {cluster.nodes} node(s)"
    yield "layout", ranks if plan.choice is None else f"{ranks}: dp {plan.dp_size}, {plan.choice}"
    yield "parameters", str(plan.parameters or _UNKNOWN)
    if estimate is None:
        yield "memory a rank", _UNKNOWN
    else:
        kinds = ", ".join(f"{kind.name} {getattr(estimate.memory, kind.name) / GIB:.2f}" for kind in fields(Memory))
        usable = f"{estimate.memory.total / GIB:.2f} of {cluster.usable_bytes / GIB:.0f} usable GiB"
        yield "memory a rank", f"{usable}: {kinds}"
        if estimate.host_bytes:
            yield "memory a rank", f"{estimate.host_bytes / GIB:.2f} GiB in its host's memory"
    batches = "1 micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches or '?'} micro-batches"
    yield "batch", f"{plan.tokens_per_step:,} tokens a step, {batches} a rank"
    yield "steps", f"{plan.steps:,}, {plan.steps * plan.tokens_per_step:,} tokens in all"
    for corpus in plan.corpora:
        yield f"corpus {corpus.name}", f"{corpus.role}, {_size(corpus)}"
    if saved is None:
        yield "checkpoints", _UNKNOWN
    else:
        size = f"{saved.bytes_each / 1e9:.3g} GB each"
        yield "checkpoints", f"{saved.written:,} of {size}, at most {saved.most_at_once} at once"
        yield "checkpoints", f"{saved.needed_bytes / 1e9:.3g} GB more needed, {saved.free_bytes / 1e9:.3g} GB free"
    heldout = [
        f"{corpus.validation_sequences} of {corpus.name}" for corpus in plan.corpora if corpus.validation_sequences
    ]
    yield "validation", f"{plan.validations:,} times" + (f", sequences: {', '.join(heldout)}" if heldout else "")
    if plan.duration_s is None:
        yield "duration", "unknown on CPUs; scale-cpt status measures the first steps" if cluster.on_cpu else _UNKNOWN
    else:
        whole = f"{timedelta(seconds=round(plan.duration_s))} for {plan.steps:,} steps, without validations and saves"
        source = f"estimated for ranks of {cluster.peak_tflops:g} TFLOP/s at MFU {cluster.mfu:g}"
        yield "duration", f"{whole} ({source}; see --peak-tflops, --mfu)"
    yield "stages", ", ".join(plan.stages)
    yield "export", plan.export or _UNKNOWN
    for missing in plan.to_make:
        yield "yet to make", missing
    for fault in plan.faults or ("none found",):
        yield "errors", fault


def _size(corpus: CorpusPlan) -> str:
    if corpus.tokens is None:
        return "not made yet: the number of epochs is unknown"
    return f"{corpus.tokens:,} tokens, {f'{corpus.epochs:.3g} epochs' if corpus.epochs else 'not read'}"


def dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.run` on the cluster of `arguments`. Returns 1 if the run could not start.

    Raises:
        ConfigError: the configuration is invalid.
    """
    config = load_config(arguments.run, arguments.set)
    plan = make_plan(config, cluster_of(arguments), arguments.base_config)
    text = json.dumps(as_values(plan), indent=2) if arguments.json else as_text(plan)
    sys.stdout.write(text + "\n")
    return 1 if plan.faults else 0
