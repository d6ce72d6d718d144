"""The dry run: what a run will do on its own layout, and the errors that would stop it; as text and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.checks.door import faults_of
from pipeline.checks.inputs import Opened
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
from pipeline.sizing.estimate import Estimate, Estimator
from pipeline.sizing.memory import checkpoint_bytes, checkpoints_bytes, held_bytes, most_checkpoints, no_room


@dataclass
class Plan:
    """What a run will do.

    Attributes:
        rows: of text, each under a name.
        figures: the same for programs, in bytes, seconds and tokens; without those that cannot be known.
        to_make: the inputs that earlier stages have not made yet.
        faults: the errors that would stop the run.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    to_make: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, row: str, text: str, **figures: object) -> None:
        self.rows.append((row, text))
        self.figures |= figures

    def __str__(self) -> str:
        """A few dozen lines, with the errors at the end."""
        ends = [("yet to make", text) for text in self.to_make]
        ends += [("errors", text) for text in self.faults or ["none found"]]
        width, lines, before = max(len(name) for name, _ in self.rows), [], ""
        for name, text in [*self.rows, *ends]:
            lines.append(f"{'' if name == before else name:<{width}}  {text}")
            before = name
        return "\n".join(lines)


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> Plan:
    """The plan of `config` on `cluster`; `base_config` is the base's config.json, if its folder is missing.

    It lacks what cannot be known because of a fault.
    """
    run = Opened(config, cluster.gpus, base_config)
    faults, plan = faults_of(run), Plan(to_make=list(_to_make(config)))
    spec, deepspeed, estimate = run.get("model"), run.get("deepspeed_config"), None
    plan.add("run", f"{config.name}, in {config.folder}", name=config.name, folder=str(config.folder))
    ranks = f"{cluster.gpus} {'CPU processes' if cluster.on_cpu else 'GPUs'} on {cluster.nodes} node(s)"
    if spec is None or deepspeed is None:
        plan.add("layout", ranks)
    else:
        estimator = Estimator(config, spec, deepspeed, cluster)
        own, dp_size = estimator.own_choice, run.layout.dp_size
        plan.add("layout", f"{ranks}: dp {dp_size}, {own}", dp_size=dp_size, choice=own._asdict())
        plan.add("parameters", str(estimator.parameters), parameters=asdict(estimator.parameters))
        faults += _add_checkpoints(plan, estimator)
        try:
            estimate = estimator.estimate(own)
            faults += _add_memory(plan, estimate, cluster)
        except UserError as error:
            faults.append(error)
    _add_steps(plan, config, estimate, cluster)
    _add_corpora(plan, run)
    stages = list(_stages(config))
    plan.add("stages", ", ".join(stages), stages=stages)
    if spec is not None:
        scale = config.method if isinstance(config.method, ScaleMethod) else None
        expansion = plan_expansion(scale, spec.widths, spec.num_layers) if scale else None
        export = describe_formats(why_not(config.method, expansion, spec, gated=config.gate is not None))
        plan.add("export", export, export=export)
    plan.faults = [str(fault) for fault in faults]
    return plan


def _add_memory(plan: Plan, estimate: Estimate, cluster: Cluster) -> list[UserError]:
    """The memory of a rank; that it does not fit is a fault."""
    needed, usable, fits = estimate.memory.total, cluster.usable_bytes / GIB, estimate.fits(cluster)
    kinds = asdict(estimate.memory)
    parts = ", ".join(f"{kind} {count / GIB:.2f}" for kind, count in kinds.items())
    figures = {"memory": {**kinds, "total": needed}, "host_bytes": estimate.host_bytes, "fits": fits}
    plan.add("memory a rank", f"{needed / GIB:.2f} of {usable:.0f} usable GiB: {parts}", **figures)
    if estimate.host_bytes:
        plan.add("memory a rank", f"{estimate.host_bytes / GIB:.2f} GiB in its host's memory")
    if fits:
        return []
    needs = f"a rank needs {needed / GIB:.1f} GiB of the usable {usable:.0f}"
    return [LayoutError(f"memory: {needs}; scale-cpt estimate recommends a layout that fits")]


def _add_checkpoints(plan: Plan, estimator: Estimator) -> list[UserError]:
    """Number and size of the checkpoints, and the space for the most that exist at once; its lack is a fault."""
    config, parameters = estimator.config, estimator.parameters
    folder = config.checkpoint_folder
    figures = {
        "written": _times(config, config.checkpoints.every_steps),
        "bytes_each": checkpoint_bytes(parameters),
        "most_at_once": most_checkpoints(config),
        "needed_bytes": (needed := max(0, checkpoints_bytes(config, parameters) - held_bytes(folder))),
        "free_bytes": (free := free_bytes(folder)),
    }
    size = f"{figures['bytes_each'] / 1e9:.3g} GB each"
    text = f"{figures['written']:,} of {size}, at most {figures['most_at_once']} at once"
    plan.add("checkpoints", text, checkpoints=figures)
    plan.add("checkpoints", f"{needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free")
    return [no_room(folder, needed, free)] if free < needed else []


def _add_steps(plan: Plan, config: RunConfig, estimate: Estimate | None, cluster: Cluster) -> None:
    """The batch, the number of steps, and how long they take."""
    steps, a_step = config.schedule.steps, config.schedule.global_batch_size * config.data.sequence_length
    micro = estimate.micro_batches if estimate else None
    batches = "1 micro-batch" if micro == 1 else f"{micro or '?'} micro-batches"
    plan.add("batch", f"{a_step:,} tokens a step, {batches} a rank", micro_batches=micro, tokens_per_step=a_step)
    plan.add("steps", f"{steps:,}, {steps * a_step:,} tokens in all", steps=steps, tokens=steps * a_step)
    if cluster.on_cpu:
        plan.add("duration", "unknown on CPUs; scale-cpt status measures the first steps")
    elif estimate is not None:
        seconds = steps * estimate.step_s
        whole = f"{timedelta(seconds=round(seconds))} for {steps:,} steps, without validations and saves"
        source = f"estimated for ranks of {cluster.peak_tflops:g} TFLOP/s at MFU {cluster.mfu:g}"
        plan.add("duration", f"{whole} ({source}; see --peak-tflops, --mfu)", duration_s=seconds)


def _add_corpora(plan: Plan, run: Opened) -> None:
    """The size of each corpus, how often the run reads it, and how many of its held-out sequences a validation has."""
    data, config = run.config.data, run.config
    samples = run.get("samples") if is_tokenized(data) else None
    read = config.schedule.steps * config.schedule.global_batch_size
    epochs = samples.training.epochs_after(read) if samples else {}
    figures, heldout = {}, []
    for name, corpus in data.corpora.items():
        folder = train_folder(data, name)
        tokens = load_manifest(folder).tokens if (folder / CORPUS_MANIFEST).exists() else None
        figures[name] = {"role": corpus.role, "tokens": tokens}
        text = "not made yet" if tokens is None else f"{tokens:,} tokens"
        if samples:
            times = figures[name]["epochs"] = epochs.get(name, 0.0)
            text += f", {f'{times:.3g} epochs' if times else 'not read'}"
        plan.add(f"corpus {name}", f"{corpus.role}, {text}")
        if samples and name in samples.heldout:
            count = min(len(samples.heldout[name]), config.validation.max_sequences)
            figures[name]["validation_sequences"] = count
            heldout.append(f"{count} of {name}")
    times = 1 + _times(config, config.validation.every_steps)
    text = f"{times:,} times" + (f", sequences: {', '.join(heldout)}" if heldout else "")
    plan.add("validation", text, validations=times, corpora=figures)


def _times(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


def _stages(config: RunConfig) -> Iterator[str]:
    """The stages of the run, in order."""
    sampled = any(corpus.sample is not None for corpus in config.data.corpora.values())
    wanted = {"sample": sampled, "upscale": isinstance(config.method, ScaleMethod), "gate": config.gate is not None}
    stages = ("tokenize", "sample", "upscale", "train", "gate", "convert", "evaluate")
    return (stage for stage in stages if wanted.get(stage, True))


def _to_make(config: RunConfig) -> Iterator[str]:
    """The inputs that earlier stages have not made yet."""
    unfinished = [config.data.corpora[name] for name in unfinished_corpora(config.data)]
    if any(corpus.sample is None for corpus in unfinished):
        yield f"{config.data.folder}: the token corpora (scale-cpt tokenize)"
    if any(corpus.sample is not None for corpus in unfinished):
        yield f"{config.data.folder}: the text that the base writes (scale-cpt sample)"
    if isinstance(config.method, ScaleMethod) and not (config.upscaled_folder / MANIFEST).exists():
        yield f"{config.upscaled_folder}: the initial expansion (scale-cpt upscale)"


def dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.run` on the cluster of `arguments`. Returns 1 if the run could not start."""
    plan = make_plan(load_config(arguments.run, arguments.set), cluster_of(arguments), arguments.base_config)
    ends = {"to_make": plan.to_make, "faults": plan.faults, "could_start": not plan.faults}
    text = json.dumps(plan.figures | ends, indent=2) if arguments.json else str(plan)
    sys.stdout.write(text + "\n")
    return 1 if plan.faults else 0
