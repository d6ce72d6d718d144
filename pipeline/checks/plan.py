"""The dry run: what a run will do on its own layout, and the errors that would stop it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from pipeline.checks.checklist import faults_of
from pipeline.checks.inputs import Inputs
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import HF_FOLDER
from pipeline.conversion.formats import describe_formats, unsupported_reason
from pipeline.data.corpus.manifest import MANIFEST as CORPUS_MANIFEST
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize.corpora import (
    corpus_jobs,
    is_tokenized,
    train_folder,
    unfinished_corpora,
)
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.units import is_here
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import LayoutError, PreflightError, UserError
from pipeline.expansion_folder import MANIFEST
from pipeline.files import free_bytes, held_bytes
from pipeline.hf.served_tokenizer import warn_of_base
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster, cluster_of
from pipeline.sizing.estimate import Estimate, Estimator
from pipeline.sizing.memory import checkpoint_bytes, checkpoints_bytes, most_checkpoints, no_room

_TOKEN_BYTES = 4
"""Of a token of a large vocabulary."""
_UPSCALED_BYTES = 4
"""Of an element of the initial expansion, which is stored in fp32."""


@dataclass
class Plan:
    """What a run will do: rows of text, each under a name; the inputs that are yet to be made; the faults."""

    rows: list[tuple[str, str]]
    to_make: list[str]
    faults: list[str]

    def __str__(self) -> str:
        """A few dozen lines, with the errors at the end."""
        rows = [*self.rows, *(("yet to make", text) for text in self.to_make)]
        rows += [("errors", text) for text in self.faults or ["none found"]]
        width, names = max(len(name) for name, _ in self.rows), [name for name, _ in rows]
        shown = (
            "" if name == before else name
            for before, name in zip(["", *names], names, strict=False)
        )
        return "\n".join(
            f"{name:<{width}}  {text}" for name, (_, text) in zip(shown, rows, strict=True)
        )


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> Plan:
    """The plan of `config` on `cluster`; `base_config` is the base's config.json, if its folder is missing.

    It lacks what cannot be known because of a fault.
    """
    run = Inputs(config, cluster.gpus, base_config)
    faults = faults_of(run)
    spec, deepspeed, estimate = run.get("fitting_spec"), run.get("deepspeed_config"), None
    ranks = (
        f"{cluster.gpus} {'CPU processes' if cluster.on_cpu else 'GPUs'} on {cluster.nodes} node(s)"
    )
    rows = [("run", f"{config.name}, in {config.folder}")]
    if spec is None or deepspeed is None:
        rows.append(("layout", ranks))
    else:
        estimator = Estimator(config, spec, deepspeed, cluster)
        rows.append(("layout", f"{ranks}: dp {run.layout.dp_size}, {estimator.own_choice}"))
        rows.append(("parameters", str(estimator.parameters)))
        rows += _checkpoints(estimator, faults)
        rows += _disk_space(estimator, faults)
        try:
            estimate = estimator.estimate(estimator.own_choice)
            rows += _memory(estimate, cluster, faults)
        except UserError as error:
            faults.append(error)
    rows += _steps(config, estimate, cluster)
    rows += _corpora(run)
    rows += _tokenizer(run)
    rows.append(("stages", ", ".join(_stages(config))))
    if spec is not None:
        scale = config.method if isinstance(config.method, ScaleMethod) else None
        expansion = plan_expansion(scale, spec.widths, spec.num_layers) if scale else None
        refused = unsupported_reason(config.method, expansion, spec, gated=config.gate is not None)
        rows.append(("export", describe_formats(refused)))
    return Plan(rows, list(_to_make(config)), [str(fault) for fault in faults])


def _memory(
    estimate: Estimate, cluster: Cluster, faults: list[UserError]
) -> Iterator[tuple[str, str]]:
    """The memory of a rank; that it does not fit is a fault."""
    needed, usable = estimate.memory.total / GIB, cluster.usable_bytes / GIB
    parts = ", ".join(
        f"{kind} {count / GIB:.2f}" for kind, count in asdict(estimate.memory).items()
    )
    yield "memory a rank", f"{needed:.2f} of {usable:.0f} usable GiB: {parts}"
    if estimate.fits(cluster) and not estimate.is_safe(cluster):
        yield (
            "memory a rank",
            f"tight: the estimate may be wrong by {MEMORY_ERROR:.0%}; see scale-cpt estimate",
        )
    if estimate.host_bytes:
        yield "memory a rank", f"{estimate.host_bytes / GIB:.2f} GiB in its host's memory"
    if not estimate.fits(cluster):
        needs = f"a rank needs {needed:.1f} GiB of the usable {usable:.0f}"
        faults.append(
            LayoutError(f"memory: {needs}; scale-cpt estimate recommends a layout that fits")
        )


def _checkpoints(estimator: Estimator, faults: list[UserError]) -> Iterator[tuple[str, str]]:
    """Number and size of the checkpoints, and the space for the most that exist at once; its lack is a fault."""
    config, parameters, folder = (
        estimator.config,
        estimator.parameters,
        estimator.config.checkpoint_folder,
    )
    needed = max(0, checkpoints_bytes(config, parameters) - held_bytes(folder))
    size, free = checkpoint_bytes(parameters) / 1e9, free_bytes(folder)
    number = f"{_times(config, config.checkpoints.every_steps):,} of {size:.3g} GB each"
    yield "checkpoints", f"{number}, at most {most_checkpoints(config)} at once"
    yield "checkpoints", f"{needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
    if free < needed:
        faults.append(no_room(folder, needed, free))


def _disk_space(estimator: Estimator, faults: list[UserError]) -> Iterator[tuple[str, str]]:
    """About what all stages will write more, by kind, with what is free; its lack is a fault of its own.

    Each folder counts for the file system that it is on. Unknown sizes are said to be unknown.
    """
    config, parameters = estimator.config, estimator.parameters
    folder, itemsize = config.folder, estimator.deepspeed.dtype.itemsize
    known = {
        "checkpoints": max(
            0, checkpoints_bytes(config, parameters) - held_bytes(config.checkpoint_folder)
        )
    }
    if isinstance(config.method, ScaleMethod) and config.init_expansion is None:
        known["expansion"] = max(
            0, parameters.expansion * _UPSCALED_BYTES - held_bytes(config.initial_expansion_folder)
        )
    # In the base's type, which is that of training on GPUs.
    known["export"] = max(0, parameters.total * itemsize - held_bytes(folder / HF_FOLDER))
    tokens = _tokens_bytes(config)
    texts = [f"{name} {size / 1e9:.3g}" for name, size in known.items()]
    texts.insert(0, "tokens unknown" if tokens is None else f"tokens {tokens / 1e9:.3g}")
    on_disk = {folder: sum(known.values())}
    data = config.data.folder
    if tokens is not None:
        place = folder if _device_of(data) == _device_of(folder) else data
        on_disk[place] = on_disk.get(place, 0) + tokens
    yield "disk space", f"about {sum(on_disk.values()) / 1e9:.3g} GB more: {', '.join(texts)}"
    for place, needed in on_disk.items():
        free = free_bytes(place)
        yield "disk space", f"{place}: {needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
        if needed > free > known["checkpoints"]:  # else the fault of the checkpoints has said it
            faults.append(
                PreflightError(
                    f"{place}: tokens, expansion, checkpoints and export need about {needed / 1e9:.3g} GB more, found "
                    f"{free / 1e9:.3g} GB free; make room, or set folder or data.folder to another disk"
                )
            )


def _tokens_bytes(config: RunConfig) -> int | None:
    """About what the corpora that are yet to be made will take; None where an input cannot be read here."""
    data = config.data
    needed = 0
    try:
        for job in corpus_jobs(data, config.tokenizer):
            if (job.output / CORPUS_MANIFEST).exists():
                continue
            if not is_here(job.corpus.input):  # on the hub
                return None
            needed += max(0, corpus_bytes(job) - held_bytes(job.output))
    except (UserError, OSError):  # which is among the faults
        return None
    for name, corpus in data.corpora.items():
        if corpus.sample is not None and not (train_folder(data, name) / CORPUS_MANIFEST).exists():
            needed += corpus.sample.tokens * _TOKEN_BYTES
    return needed


def _device_of(folder: Path) -> int:
    """The file system of a folder, which need not exist."""
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    return existing.stat().st_dev


def _steps(
    config: RunConfig, estimate: Estimate | None, cluster: Cluster
) -> Iterator[tuple[str, str]]:
    """The batch, the number of steps, and how long they take."""
    steps, a_step = (
        config.schedule.steps,
        config.schedule.global_batch_size * config.data.sequence_length,
    )
    micro = estimate.micro_batches if estimate else None
    batches = "1 micro-batch" if micro == 1 else f"{micro or '?'} micro-batches"
    yield "batch", f"{a_step:,} tokens a step, {batches} a rank"
    yield "steps", f"{steps:,}, {steps * a_step:,} tokens in all"
    if cluster.on_cpu:
        yield "duration", "unknown on CPUs; scale-cpt status measures the first steps"
    elif estimate is not None:
        whole = timedelta(seconds=round(steps * estimate.step_s))
        source = f"estimated for ranks of {cluster.peak_tflops:g} TFLOP/s at MFU {cluster.mfu:g}"
        text = f"{whole} for {steps:,} steps, without validations and saves ({source}; see --peak-tflops, --mfu)"
        yield "duration", text


def _corpora(run: Inputs) -> Iterator[tuple[str, str]]:
    """The size of each corpus, how often the run reads it, and how many of its held-out sequences a validation has."""
    data, config = run.config.data, run.config
    samples = run.get("samples") if is_tokenized(data) else None
    read = config.schedule.steps * config.schedule.global_batch_size
    epochs = samples.training.epochs_after(read) if samples else {}
    for name, corpus in data.corpora.items():
        folder, text = train_folder(data, name), "not made yet"
        if (folder / CORPUS_MANIFEST).exists():
            text = f"{load_manifest(folder).tokens:,} tokens"
        if samples:
            text += f", {epochs[name]:.3g} epochs" if epochs.get(name) else ", not read"
        yield f"corpus {name}", f"{corpus.role}, {text}"
    heldout = samples.heldout if samples else {}
    counts = [
        f"{min(len(own), config.validation.max_sequences)} of {name}"
        for name, own in heldout.items()
    ]
    text = f", sequences: {', '.join(counts)}" if counts else ""
    yield "validation", f"{1 + _times(config, config.validation.every_steps):,} times{text}"


def _tokenizer(run: Inputs) -> Iterator[tuple[str, str]]:
    """Whether what transformers makes of the base's folder has the ids of its tokenizer.json."""
    base = run.config.base
    if not base.is_dir() or run.get("tokenizer") is None:
        return
    try:
        warning = warn_of_base(base, load_tokenizer(base), run.compared_texts)
    except UserError as fault:
        warning = str(fault)
    yield (
        "tokenizer",
        warning or "the base's AutoTokenizer has the same ids on all texts that were compared",
    )


def _times(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


def _stages(config: RunConfig) -> Iterator[str]:
    sampled = any(corpus.sample is not None for corpus in config.data.corpora.values())
    wanted = {
        "sample": sampled,
        "upscale": isinstance(config.method, ScaleMethod),
        "gate": config.gate is not None,
    }
    stages = ("tokenize", "sample", "upscale", "train", "gate", "convert", "evaluate")
    return (stage for stage in stages if wanted.get(stage, True))


def _to_make(config: RunConfig) -> Iterator[str]:
    """The inputs that earlier stages have not made yet."""
    unfinished = [config.data.corpora[name] for name in unfinished_corpora(config.data)]
    if any(corpus.sample is None for corpus in unfinished):
        yield f"{config.data.folder}: the token corpora (scale-cpt tokenize)"
    if any(corpus.sample is not None for corpus in unfinished):
        yield f"{config.data.folder}: the text that the base writes (scale-cpt sample)"
    if (
        isinstance(config.method, ScaleMethod)
        and not (config.initial_expansion_folder / MANIFEST).exists()
    ):
        yield f"{config.initial_expansion_folder}: the initial expansion (scale-cpt upscale)"


def dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.run` on the cluster of `arguments`. Returns 1 if the run could not start."""
    plan = make_plan(
        load_config(arguments.run, arguments.set), cluster_of(arguments), arguments.base_config
    )
    sys.stdout.write(f"{plan}\n")
    return 1 if plan.faults else 0
