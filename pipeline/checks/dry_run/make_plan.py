"""Makes the plan of a run: rows of text, figures for programs, and the faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pipeline.checks.checklist import faults_of
from pipeline.checks.dry_run.data_rows import corpus_rows, tokenizer_rows
from pipeline.checks.dry_run.disk_rows import checkpoint_rows, disk_space_rows
from pipeline.checks.dry_run.job_stages import inputs_to_make, job_stages
from pipeline.checks.dry_run.run_plan import Row, RunPlan
from pipeline.checks.dry_run.serving import describe_serving
from pipeline.checks.inputs import RunInputs
from pipeline.config.method import Lora, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import tokens_after, training_stages
from pipeline.config.stages import proportions
from pipeline.conversion.formats import describe_formats, unsupported_reasons
from pipeline.deepspeed_config import accumulation_steps
from pipeline.errors import LayoutError, UserError
from pipeline.methods.build_model import build_model
from pipeline.methods.parameter_groups import group_lines
from pipeline.model.bases import kind_of
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.estimate import Estimate, Estimator, estimator_of
from pipeline.sizing.meta_device import NotTracedError
from pipeline.sizing.report import layout_values


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> RunPlan:
    """The plan of a run. A fault may hide parts of it, which are then missing.

    Args:
        config: The run.
        cluster: The GPUs, or the CPU processes, that will train it.
        base_config: The base's config.json, if its folder is missing.
    """
    inputs = RunInputs(config, cluster.gpus, base_config)
    faults = faults_of(inputs)
    spec = inputs.get_or_none("fitting_spec")
    deepspeed = inputs.get_or_none("deepspeed_config")
    ranks = f"{cluster.gpus} {cluster.processes} on {cluster.nodes} node(s)"
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
        figures["parameters"] = estimator.parameters.values
        if estimator.parameter_bound is not None:
            rows.append(("parameters", estimator.parameter_bound))
        rows += checkpoint_rows(estimator, faults)
        rows += disk_space_rows(estimator, faults)
        rows += kind_of(spec).dry_run_rows(spec, config.base_precision)
        flash = inputs.get_or_none("flash_attention")
        if flash is not None and not cluster.on_cpu:
            rows.append(("attention", flash.text))
        if not spec.is_native:
            rows.append(_whole_base_row(estimator))
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
    rows += _step_rows(inputs, estimator, estimate)
    rows += corpus_rows(inputs)
    rows += tokenizer_rows(inputs)
    if spec is not None:
        rows += inputs.method.dry_run_rows(spec)
    rows.append(("job stages", ", ".join(job_stages(config))))
    if spec is not None:
        expansion = None
        if isinstance(config.method, (ScaleMethod, Lora)):
            expansion = plan_expansion(config.method, spec.widths, spec.num_layers)
        refused = unsupported_reasons(config.method, expansion, spec, gated=config.gate is not None)
        rows.append(("export", describe_formats(refused)))
        figures["formats"] = refused
        rows.append(("serving", describe_serving(config.gate, expansion, spec, refused)))
    return RunPlan(rows, list(inputs_to_make(config)), [str(fault) for fault in faults], figures)


def _first_figures(config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """The figures that follow from the configuration; others are None until they are known."""
    stages = training_stages(config)
    steps = config.schedule.steps
    stage_figures: list[dict[str, Any]] = []
    if config.stages:
        for stage in stages:
            stage_figures.append(
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
        "training_stages": stage_figures,
        "stages": list(job_stages(config)),
        "parameters": None,
        "layout": None,
        "groups": None,
        "formats": None,
    }


def _launch_rows(cluster: Cluster) -> Iterator[Row]:
    """How to start several ranks on one machine: `scale-cpt train` alone starts one rank."""
    if cluster.nodes == 1 and cluster.gpus > 1:
        yield (
            "launch",
            f"NPROC={cluster.gpus} bash slurm/cpt_korean.sh, or scale-cpt train --ranks "
            f"{cluster.gpus}; without --ranks or a launcher, scale-cpt train is one rank",
        )


def _whole_base_row(estimator: Estimator) -> Row:
    """The memory that the loading of a base takes which is read whole."""
    rank_bytes = estimator.parameters.base * estimator.deepspeed.dtype.itemsize
    cluster = estimator.cluster
    ranks_on_node = min(cluster.gpus, cluster.gpus_per_node)
    node_bytes = ranks_on_node * rank_bytes
    return (
        "base",
        f"each rank loads it whole when the run starts: {rank_bytes / GIB:.3g} GiB, "
        f"{node_bytes / GIB:.3g} GiB of a node's memory",
    )


def _memory_rows(estimate: Estimate, cluster: Cluster, faults: list[UserError]) -> Iterator[Row]:
    """The memory of a rank. A fault is added where it does not fit."""
    needed = estimate.memory.total / GIB
    usable = cluster.usable_bytes / GIB
    kinds: list[str] = []
    for kind, count in asdict(estimate.memory).items():
        kinds.append(f"{kind} {count / GIB:.2f}")
    yield "memory a rank", f"{needed:.2f} of {usable:.3g} usable GiB: {', '.join(kinds)}"
    if estimate.fits(cluster) and not estimate.is_safe(cluster):
        error = f"the estimate may be wrong by {MEMORY_ERROR:.0%}"
        yield "memory a rank", f"tight: {error}; see scale-cpt estimate"
    if estimate.host_bytes:
        yield "memory a rank", f"{estimate.host_bytes / GIB:.2f} GiB in its host's memory"
    if not estimate.fits(cluster):
        faults.append(
            LayoutError(
                f"memory: a rank needs {needed:.1f} GiB of the usable {usable:.3g}; "
                "scale-cpt estimate recommends a layout that fits"
            )
        )


def _training_stage_rows(inputs: RunInputs) -> Iterator[Row]:
    """Steps, rates, trained parameters and data of each stage of training, a row for each."""
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
        read: list[str] = []
        for name, weight in weights.items():
            read.append(f"{name} {weight:g}")
        for role, fraction in fractions.items():
            read.append(f"{role} {fraction:.1%} of the samples")
        text += f"; weights {', '.join(read)}"
        if stage.passage_steps:
            text += f", after a passage of {stage.passage_steps:,} steps"
        yield "training stage", text


def _trained_elements(config: RunConfig, spec: DecoderSpec) -> int:
    """The number of elements that train in a run, or in a stage of one."""
    with torch.device("meta"):
        model = build_model(config, spec, SINGLE)
    return sum(parameter.numel() for _, parameter in named_trained_parameters(model))


def _step_rows(
    inputs: RunInputs, estimator: Estimator | None, estimate: Estimate | None
) -> Iterator[Row]:
    """The batch, the number of steps, and how long they take."""
    config = inputs.config
    steps = config.schedule.steps
    stages = training_stages(config)
    stage = stages[0] if estimator is None else estimator.stage
    text = f"{stage.tokens_per_step:,} tokens a step"
    layout = inputs.get_or_none("layout")
    # None if the batch does not divide among the ranks, which is among the faults.
    if layout is not None:
        number = accumulation_steps(stage.config.schedule, layout.dp_size)
        plural = "" if number == 1 else "es"
        text += f", {number} micro-batch{plural} a rank"
    if stage.name:
        text += f", in stage {stage.name}"
    yield "batch", text
    yield "steps", f"{steps:,}, {tokens_after(stages, steps):,} tokens in all"
    if estimator is None:
        return
    text = f"for {steps:,} steps, without validations and saves; speed of a rank: {estimator.speed}"
    if estimate is not None:
        yield "duration", f"{_rounded(estimator.run_seconds(estimate.choice))} {text}"
    elif layout is not None:
        yield (
            "duration",
            f"about {_rounded(estimator.rough_seconds())}, by 6 FLOPs for each parameter, {text}",
        )


def _rounded(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
