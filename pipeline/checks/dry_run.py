"""The dry run: the plan of a run on its own layout, and the faults that would stop it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pipeline.checks.checklist import faults_of
from pipeline.checks.inputs import RunInputs
from pipeline.config.data import Corpus
from pipeline.config.method import Lora, ScaleMethod, starts_from_expansion
from pipeline.config.run import GateSettings, RunConfig
from pipeline.config.stage_plan import tokens_after, training_stages
from pipeline.config.stages import proportions
from pipeline.conversion.convert import HF_FOLDER
from pipeline.conversion.formats import auto_format, describe_formats, unsupported_reason
from pipeline.data.corpus.manifest import MANIFEST as CORPUS_MANIFEST
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize.corpora import (
    corpus_jobs,
    is_tokenized,
    train_folder,
    unfinished_corpora,
)
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.input_files import is_here
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.deepspeed_config import accumulation_steps
from pipeline.errors import LayoutError, PreflightError, UserError
from pipeline.expansion_folder import MANIFEST
from pipeline.files.disk_space import free_bytes, held_bytes
from pipeline.hf import Exported
from pipeline.hf.served_tokenizer import warn_of_base
from pipeline.hosted.quantized_maps import quantized_share
from pipeline.hosted.spec import HostedSpec
from pipeline.methods import build_model
from pipeline.methods.parameter_groups import group_lines
from pipeline.model.merged_model import describe_splitting
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import ExpansionPlan, plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.estimate import Estimate, Estimator, estimator_of, layout_values
from pipeline.sizing.memory import checkpoint_bytes, checkpoints_bytes, most_checkpoints, no_room
from pipeline.sizing.meta_device import NotTracedError

_TOKEN_BYTES = 4
"""The bytes of a token, for a vocabulary above 65,536."""
_SERVED_TP = 2
"""The tensor-parallel size at which a run's export should be servable."""
_EXPANSION_BYTES = 4
"""The bytes of an element of the initial expansion, which is stored in fp32."""

Row: TypeAlias = tuple[str, str]
"""A line of the plan: its name, and its text."""


@dataclass
class RunPlan:
    """What a run will do.

    Args:
        rows: Lines of text, each under a name. A name may have several lines.
        to_make: The inputs that earlier stages have not made yet.
        faults: What would stop the run.
        figures: What programs read of the plan; None where it is not known.
    """

    rows: list[Row]
    to_make: list[str]
    faults: list[str]
    figures: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """The plan for programs (docs/json.md)."""
        rows = [{"name": name, "text": text} for name, text in self.rows]
        return {**self.figures, "rows": rows, "to_make": self.to_make, "errors": self.faults}

    def __str__(self) -> str:
        """A few dozen lines, with the faults at the end."""
        rows = list(self.rows)
        for text in self.to_make:
            rows.append(("yet to make", text))
        for text in self.faults or ["none found"]:
            rows.append(("errors", text))
        width = max(len(name) for name, _ in self.rows)
        lines: list[str] = []
        name_before = ""
        for name, text in rows:
            shown = "" if name == name_before else name
            lines.append(f"{shown:<{width}}  {text}")
            name_before = name
        return "\n".join(lines)


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> RunPlan:
    """The plan of a run. It lacks what cannot be known because of a fault.

    Args:
        config: The run.
        cluster: The GPUs, or the CPU processes, that will train it.
        base_config: The base's config.json, if its folder is missing.
    """
    inputs = RunInputs(config, cluster.gpus, base_config)
    faults = faults_of(inputs)
    spec = inputs.get_or_none("fitting_spec")
    deepspeed = inputs.get_or_none("deepspeed_config")
    processes = "CPU processes" if cluster.on_cpu else "GPUs"
    ranks = f"{cluster.gpus} {processes} on {cluster.nodes} node(s)"
    rows: list[Row] = [("run", f"{config.name}, in {config.folder}")]
    estimator: Estimator | None = None
    estimate: Estimate | None = None
    figures = _first_figures(config, cluster)
    if spec is None or deepspeed is None:
        rows.append(("layout", ranks))
    else:
        estimator = estimator_of(config, spec, deepspeed, cluster)
        dp_size = inputs.layout.dp_size
        rows.append(("layout", f"{ranks}: dp {dp_size}, {estimator.own_choice}"))
        rows += _launch_rows(cluster)
        rows.append(("parameters", str(estimator.parameters)))
        figures["parameters"] = asdict(estimator.parameters)
        if estimator.has_uncounted_rows:
            rows.append(
                (
                    "parameters",
                    "an upper bound, with own rows of all tokens: scale-cpt upscale counts which "
                    "tokens get one (method.own_rows.min_count)",
                )
            )
        rows += _checkpoint_rows(estimator, faults)
        rows += _disk_space_rows(estimator, faults)
        if isinstance(spec, HostedSpec):
            rows += _hosted_base_rows(spec, estimator)
        try:
            estimate = estimator.estimate(estimator.own_choice)
            rows += _memory_rows(estimate, cluster, faults)
            figures["layout"] = layout_values(estimate, estimator)
        except NotTracedError as error:
            rows.append(("memory a rank", str(error)))
        except UserError as error:
            faults.append(error)
    groups = inputs.get_or_none("parameter_groups")
    if groups is not None:
        rows += [("groups", line) for line in group_lines(groups)]
        figures["groups"] = [asdict(row) for row in groups]
    if config.stages:
        rows += _training_stage_rows(inputs)
    rows += _step_rows(inputs, estimator, estimate, cluster)
    rows += _corpus_rows(inputs)
    rows += _tokenizer_rows(inputs)
    rows += _own_weight_rows(config, spec)
    rows.append(("job stages", ", ".join(_job_stages(config))))
    if spec is not None:
        expansion = None
        if isinstance(config.method, (ScaleMethod, Lora)):
            expansion = plan_expansion(config.method, spec.widths, spec.num_layers)
        refused = unsupported_reason(config.method, expansion, spec, gated=config.gate is not None)
        rows.append(("export", describe_formats(refused)))
        figures["formats"] = refused
        rows.append(("serving", _describe_serving(config.gate, expansion, spec, refused)))
    return RunPlan(rows, list(_to_make(config)), [str(fault) for fault in faults], figures)


def _first_figures(config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """The figures that the configuration alone gives, and places for the others."""
    stages = training_stages(config)
    steps = config.schedule.steps
    of_stages: list[dict[str, Any]] = []
    if config.stages:
        for stage in stages:
            of_stages.append(
                {
                    "name": stage.name,
                    "steps": stage.steps,
                    "tokens_per_step": stage.tokens_per_step,
                    "trains": list(stage.config.stages[0].trains),
                }
            )
    return {
        "run": config.name,
        "folder": str(config.folder),
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "steps": steps,
        "tokens_per_step": stages[0].tokens_per_step,
        "tokens": tokens_after(stages, steps),
        "training_stages": of_stages,
        "stages": list(_job_stages(config)),
        "parameters": None,
        "layout": None,
        "groups": None,
        "formats": None,
    }


def _describe_serving(
    gate: GateSettings | None,
    expansion: ExpansionPlan | None,
    spec: DecoderSpec,
    refused: Mapping[Exported, str | None],
) -> str:
    """Whether the run's export can be served by two GPUs: its widths are chosen before training.

    refused: why the run cannot leave in each format; None where it can.
    """
    format = auto_format(refused)
    if format == "merged":
        added = None if expansion is None else expansion.expansion
        return describe_splitting(added, spec, _SERVED_TP)
    if refused[format] is not None:
        reason = f"format {format} is not possible: {refused[format]}"
    elif format == "difference":
        reason = "vLLM does not run format difference (transformers does)"
    else:
        not_run = _not_run_by_vllm(gate, expansion, spec)
        reason = "vLLM runs format scale on one rank"
        if not_run is not None:
            reason = f"vLLM does not run format scale with {not_run} (transformers does)"
    return (
        f"CANNOT BE SERVED AT TP {_SERVED_TP}: {reason}, and a merged export is not possible: "
        f"{refused['merged']}"
    )


def _not_run_by_vllm(
    gate: GateSettings | None, expansion: ExpansionPlan | None, spec: DecoderSpec
) -> str | None:
    """What of a scale export the plugin for vLLM does not run, as it says when it loads one; None
    if it runs all (serving/scale_cpt_serving/vllm_model.py).
    """
    if not spec.is_native:
        return "a hosted base"
    if spec.mixture is not None:
        return "a mixture of experts"
    if expansion is not None and expansion.own is not None:
        return "open tokens' own weights"
    if gate is not None and expansion is not None:
        if expansion.gate_layer(gate.layer) > expansion.last_exact_layer:
            return "layers that run twice below the gate"
        if gate.features == "token+running_mean":
            return "a running mean that its gate reads (gate.features: token needs none)"
    for layer in spec.layers:
        if layer.rotary is not None and layer.rotary.context is not None:
            return "rotary frequencies that change with a text's length"
    return None


def _launch_rows(cluster: Cluster) -> Iterator[Row]:
    """How the ranks of a plan for one machine are started: not by the plain command, which trains
    as one rank.
    """
    if cluster.nodes == 1 and cluster.gpus > 1:
        yield (
            "launch",
            f"NPROC={cluster.gpus} bash slurm/cpt_korean.sh, or scale-cpt train --ranks "
            f"{cluster.gpus}; without --ranks or a launcher, scale-cpt train is one rank",
        )


def _own_weight_rows(config: RunConfig, spec: DecoderSpec | None) -> Iterator[Row]:
    """Which modules of a hosted base have weights of open tokens' own."""
    method = config.method
    if not isinstance(spec, HostedSpec) or not isinstance(method, (ScaleMethod, Lora)):
        return
    plan = plan_expansion(method, spec.widths, spec.num_layers)
    if plan.own is not None and (plan.own.gains or plan.own.low_rank is not None):
        yield "own weights", spec.describe_own(plan.own)


def _hosted_base_rows(spec: HostedSpec, estimator: Estimator) -> Iterator[Row]:
    """What was found of a hosted base, and what its loading takes."""
    yield "base", spec.describe()
    precision = estimator.config.base_precision
    if precision != "bf16":
        yield (
            "base",
            f"{quantized_share(spec):.0%} of its parameters are stored in {precision}: the linear "
            "maps that take every token; embedding, norms, output map and experts stay",
        )
    whole = estimator.parameters.base * estimator.deepspeed.dtype.itemsize
    cluster = estimator.cluster
    of_node = min(cluster.gpus, cluster.gpus_per_node) * whole
    yield (
        "base",
        f"each rank loads it whole when the run starts: {whole / GIB:.3g} GiB, "
        f"{of_node / GIB:.3g} GiB of a node's memory",
    )


def _memory_rows(estimate: Estimate, cluster: Cluster, faults: list[UserError]) -> Iterator[Row]:
    """The memory of a rank. A fault is added where it does not fit."""
    needed = estimate.memory.total / GIB
    usable = cluster.usable_bytes / GIB
    kinds = [f"{kind} {count / GIB:.2f}" for kind, count in asdict(estimate.memory).items()]
    yield "memory a rank", f"{needed:.2f} of {usable:.0f} usable GiB: {', '.join(kinds)}"
    if estimate.fits(cluster) and not estimate.is_safe(cluster):
        error = f"the estimate may be wrong by {MEMORY_ERROR:.0%}"
        yield "memory a rank", f"tight: {error}; see scale-cpt estimate"
    if estimate.host_bytes:
        yield "memory a rank", f"{estimate.host_bytes / GIB:.2f} GiB in its host's memory"
    if not estimate.fits(cluster):
        faults.append(
            LayoutError(
                f"memory: a rank needs {needed:.1f} GiB of the usable {usable:.0f}; "
                "scale-cpt estimate recommends a layout that fits"
            )
        )


def _checkpoint_rows(estimator: Estimator, faults: list[UserError]) -> Iterator[Row]:
    """Number and size of the checkpoints. A fault is added where the disk lacks their space."""
    config = estimator.config
    folder = config.checkpoint_folder
    needed = _more_checkpoint_bytes(estimator)
    free = free_bytes(folder)
    number = _times(config, config.checkpoints.every_steps)
    size = checkpoint_bytes(estimator.parameters)
    yield (
        "checkpoints",
        f"{number:,} of {size / 1e9:.3g} GB each, at most {most_checkpoints(config)} at once",
    )
    yield "checkpoints", f"{needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
    if free < needed:
        faults.append(no_room(folder, needed, free))


def _disk_space_rows(estimator: Estimator, faults: list[UserError]) -> Iterator[Row]:
    """About what all stages will write more, by kind, with what is free.

    Each folder counts for the file system that it is on. A size that is not known is said to be so.
    A fault is added where a file system lacks the space.
    """
    config = estimator.config
    parameters = estimator.parameters
    folder = config.folder
    checkpoints = _more_checkpoint_bytes(estimator)
    needed_by_kind = {"checkpoints": checkpoints}
    if starts_from_expansion(config.method) and config.init_expansion is None:
        expansion = parameters.expansion * _EXPANSION_BYTES
        held = held_bytes(config.initial_expansion_folder)
        needed_by_kind["expansion"] = max(0, expansion - held)
    # The export has the base's dtype, which is the dtype of training on GPUs.
    export = parameters.total * estimator.deepspeed.dtype.itemsize
    needed_by_kind["export"] = max(0, export - held_bytes(folder / HF_FOLDER))

    needed_on = {folder: sum(needed_by_kind.values())}
    tokens = _more_token_bytes(config)
    texts = ["tokens unknown"]
    if tokens is not None:
        texts = [f"tokens {tokens / 1e9:.3g}"]
        data = config.data.folder
        if _device_of(data) == _device_of(folder):
            needed_on[folder] += tokens
        else:
            needed_on[data] = tokens
    texts += [f"{kind} {size / 1e9:.3g}" for kind, size in needed_by_kind.items()]
    total = sum(needed_on.values())
    yield "disk space", f"about {total / 1e9:.3g} GB more: {', '.join(texts)}"
    for place, needed in needed_on.items():
        free = free_bytes(place)
        yield "disk space", f"{place}: {needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
        # Where the checkpoints alone do not fit, their own fault says so.
        if needed > free > checkpoints:
            faults.append(
                PreflightError(
                    f"{place}: tokens, expansion, checkpoints and export need about "
                    f"{needed / 1e9:.3g} GB more, found {free / 1e9:.3g} GB free; make room, or "
                    "set folder or data.folder to another disk"
                )
            )


def _more_checkpoint_bytes(estimator: Estimator) -> int:
    """What the checkpoints that exist at once will take beyond what their folder holds."""
    config = estimator.config
    needed = checkpoints_bytes(config, estimator.parameters)
    return max(0, needed - held_bytes(config.checkpoint_folder))


def _more_token_bytes(config: RunConfig) -> int | None:
    """About what the corpora to make will take; None where an input cannot be read here."""
    data = config.data
    needed = 0
    try:
        for job in corpus_jobs(data, config.tokenizer):
            if (job.output / CORPUS_MANIFEST).exists():
                continue
            if not is_here(job.corpus.input):
                return None  # It is on the hub, or on an object store.
            needed += max(0, corpus_bytes(job) - held_bytes(job.output))
    except (UserError, OSError):
        return None  # It is among the faults.
    for name, corpus in data.corpora.items():
        if corpus.sample is not None and not (train_folder(data, name) / CORPUS_MANIFEST).exists():
            needed += corpus.sample.tokens * _TOKEN_BYTES
    return needed


def _device_of(folder: Path) -> int:
    """The file system of a folder, which need not exist."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def _training_stage_rows(inputs: RunInputs) -> Iterator[Row]:
    """What each stage of training does, a row a stage."""
    spec = inputs.get_or_none("fitting_spec")
    for stage, settings in zip(inputs.stages, inputs.config.stages, strict=True):
        schedule = stage.config.schedule
        parts = [
            f"{schedule.steps:,} steps of {stage.tokens_per_step:,} tokens",
            f"learning rate {schedule.learning_rate:g} ({schedule.decay})",
        ]
        trains = ", ".join(settings.trains) or "everything"
        if spec is not None:
            trains += f": {_trained_elements(stage.config, spec):,} parameters"
        parts.append(f"trains {trains}")
        text = f"{stage.number + 1} {stage.name}: {'; '.join(parts)}"
        weights, fractions = proportions(stage.config.data)
        read = [f"{name} {weight:g}" for name, weight in weights.items()]
        for role, fraction in fractions.items():
            read.append(f"{role} {fraction:.1%} of the samples")
        text += f"; weights {', '.join(read)}"
        if stage.passage_steps:
            text += f", after a passage of {stage.passage_steps:,} steps"
        yield "training stage", text


def _trained_elements(config: RunConfig, spec: DecoderSpec) -> int:
    """How many elements train in a run, or in a stage of one."""
    with torch.device("meta"):
        model = build_model(config, spec, SINGLE)
    return sum(parameter.numel() for _, parameter in named_trained_parameters(model))


def _step_rows(
    inputs: RunInputs, estimator: Estimator | None, estimate: Estimate | None, cluster: Cluster
) -> Iterator[Row]:
    """The batch, the number of steps, and how long they take."""
    config = inputs.config
    steps = config.schedule.steps
    stages = training_stages(config)
    stage = stages[0] if estimator is None else estimator.stage
    text = f"{stage.tokens_per_step:,} tokens a step"
    layout = inputs.get_or_none("layout")
    # Where the batch does not divide among the ranks, an error says so.
    if layout is not None:
        number = accumulation_steps(stage.config.schedule, layout.dp_size)
        micro_batches = "1 micro-batch" if number == 1 else f"{number} micro-batches"
        text += f", {micro_batches} a rank"
    if stage.name:
        text += f", in stage {stage.name}"
    yield "batch", text
    yield "steps", f"{steps:,}, {tokens_after(stages, steps):,} tokens in all"
    if cluster.on_cpu:
        yield "duration", "unknown on CPUs; scale-cpt status measures the first steps"
    elif estimate is not None and estimator is not None:
        duration = timedelta(seconds=round(estimator.run_seconds(estimate.choice)))
        speed = f"ranks of {cluster.peak_tflops:g} TFLOP/s at MFU {cluster.mfu:g}"
        yield (
            "duration",
            f"{duration} for {steps:,} steps, without validations and saves "
            f"(estimated for {speed}; see --peak-tflops, --mfu)",
        )


def _corpus_rows(inputs: RunInputs) -> Iterator[Row]:
    """Each corpus's size and epochs, and how many held-out sequences a validation has."""
    config = inputs.config
    data = config.data
    samples = inputs.get_or_none("samples") if is_tokenized(data) else None
    epochs: Mapping[str, float] = {}
    if samples is not None:
        schedule = inputs.stages[-1].config.schedule
        last = samples.training[-1]
        stop = last.first + schedule.steps * schedule.global_batch_size
        epochs = last.samples.epochs_after(stop)
    for name, corpus in data.corpora.items():
        folder = train_folder(data, name)
        text = "not made yet"
        if (folder / CORPUS_MANIFEST).exists():
            text = f"{load_manifest(folder).tokens:,} tokens"
        if samples is not None:
            text += f", {epochs[name]:.3g} epochs" if epochs.get(name) else ", not read"
        yield f"corpus {name}", f"{corpus.role}, {text}"

    text = f"{1 + _times(config, config.validation.every_steps):,} times"
    heldout = {} if samples is None else samples.heldout
    if heldout:
        most = config.validation.max_sequences
        counts: list[str] = []
        for name, part in heldout.items():
            counts.append(f"{min(len(part), most)} of {name}")
        text += f", sequences: {', '.join(counts)}"
    yield "validation", text


def _tokenizer_rows(inputs: RunInputs) -> Iterator[Row]:
    """Whether transformers' AutoTokenizer of the base has the ids of its tokenizer.json."""
    base = inputs.config.base
    if not base.is_dir() or inputs.get_or_none("tokenizer") is None:
        return
    try:
        warning = warn_of_base(base, load_tokenizer(base), inputs.compared_texts)
    except UserError as fault:
        warning = str(fault)
    equal = "the base's AutoTokenizer has the same ids on all texts that were compared"
    yield "tokenizer", warning or equal


def _times(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


def _job_stages(config: RunConfig) -> Iterator[str]:
    """The stages of slurm/cpt_korean.sh that this run needs, in order."""
    yield "tokenize"
    if _any_is_sampled(config.data.corpora.values()):
        yield "sample"
    if starts_from_expansion(config.method):
        yield "upscale"
    yield "train"
    if config.gate is not None:
        yield "gate"
    yield "convert"
    yield "evaluate"


def _any_is_sampled(corpora: Iterable[Corpus]) -> bool:
    """Whether the base writes the text of one of these corpora."""
    return any(corpus.sample is not None for corpus in corpora)


def _to_make(config: RunConfig) -> Iterator[str]:
    """The inputs that earlier stages have not made yet."""
    data = config.data
    unfinished = [data.corpora[name] for name in unfinished_corpora(data)]
    if any(corpus.sample is None for corpus in unfinished):
        yield f"{data.folder}: the token corpora (scale-cpt tokenize)"
    if _any_is_sampled(unfinished):
        yield f"{data.folder}: the text that the base writes (scale-cpt sample)"
    expansion = config.initial_expansion_folder
    if starts_from_expansion(config.method) and not (expansion / MANIFEST).exists():
        yield f"{expansion}: the initial expansion (scale-cpt upscale)"
