"""The report of an estimate: tables for users, and values for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

from pipeline.config.method import ScaleMethod
from pipeline.deepspeed_config import zero3_unsupported_reason
from pipeline.model.merged_model import describe_serving, merged_unsupported_reason
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.estimate import Estimate, Estimator
from pipeline.sizing.layouts import Choice
from pipeline.sizing.memory import Memory
from pipeline.sizing.recommendation import needed_gib, recommend, usable_gib
from pipeline.sizing.training_state import training_state_bytes

_COLUMNS = 100
"""The width of a report."""


def report(estimator: Estimator, *, every: bool = False) -> tuple[str, Choice | None]:
    """The report of an estimate, and the recommended layout if there is one.

    Its sections are the model, a table of layouts, the times of the run's own layout and of the
    recommended one, and the recommendation. With `every`, layouts that recompute more than they
    must are listed, too.
    """
    estimates, refused = estimator.estimate_all(every=every)
    recommended, reason = recommend(estimates, estimator.cluster)
    shown = estimates if every else estimator.worth_a_row(estimates)
    sections = [
        _model_section(estimator),
        _layouts_section(shown, refused, estimator),
        _times_section(estimates, refused, recommended, estimator),
        _wrapped(f"recommended: {recommended or 'no layout'}: {reason}"),
    ]
    return "\n\n".join(sections), recommended


def report_values(
    estimator: Estimator, *, every: bool = False
) -> tuple[dict[str, Any], Choice | None]:
    """The values of a report, for programs (docs/json.md), and the recommended layout if there is
    one.

    All layouts that were estimated are listed.
    """
    cluster = estimator.cluster
    estimates, refused = estimator.estimate_all(every=every)
    recommended, reason = recommend(estimates, cluster)
    served = estimator.served_flops()
    layouts: list[dict[str, Any]] = []
    for estimate in estimates:
        layouts.append(layout_values(estimate, estimator))
    values = {
        "run": estimator.config.name,
        "parameters": estimator.parameters.values,
        "flops_per_token": estimator.flops_per_token("none", "nothing").total,
        "served_flops_per_token": None if served is None else asdict(served),
        "tokens_per_step": estimator.tokens_per_step,
        "steps": estimator.config.schedule.steps,
        "stage": estimator.stage.name or None,
        "cluster": asdict(cluster)
        | {"peak_tflops": estimator.speed.peak_tflops, "mfu": estimator.speed.mfu},
        "usable_bytes": round(cluster.usable_bytes),
        "layouts": layouts,
        "refused": refused,
        "own": estimator.own_choice._asdict(),
        "recommended": None if recommended is None else recommended._asdict(),
        "reason": reason,
    }
    return values, recommended


def layout_values(estimate: Estimate, estimator: Estimator) -> dict[str, Any]:
    """The estimate of one layout, for programs (docs/json.md)."""
    cluster = estimator.cluster
    step_s = estimate.step_s
    return {
        **estimate.choice._asdict(),
        "memory_bytes": asdict(estimate.memory),
        "total_bytes": estimate.memory.total,
        "host_bytes": estimate.host_bytes,
        "fits": _fits(estimate, cluster),
        "micro_batches": estimate.micro_batches,
        "inside_node_bytes": estimate.inside_bytes,
        "between_nodes_bytes": estimate.between_bytes,
        "compute_s": estimate.compute_s,
        "step_s": step_s,
        "tokens_per_second_per_gpu": estimator.tokens_per_step / step_s / cluster.gpus,
        "hours": estimator.run_seconds(estimate.choice) / 3600,
    }


def _fits(estimate: Estimate, cluster: Cluster) -> str:
    """Whether a layout fits: `yes`, `tight` within the error of the estimate, or `no`."""
    if estimate.is_safe(cluster):
        return "yes"
    return "tight" if estimate.fits(cluster) else "no"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, _COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _model_section(estimator: Estimator) -> str:
    """The model, its FLOPs, the batch and the cluster: a label and a text in each line."""
    cluster = estimator.cluster
    config = estimator.config
    flops = estimator.flops_per_token("none", "nothing")
    lines = [
        ("parameters", str(estimator.parameters)),
        ("state", _training_state(estimator)),
        (
            "FLOPs",
            f"{flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
            f"{flops.attention / 1e9:.2f} attention)",
        ),
        (
            "batch",
            f"{estimator.tokens_per_step:,} tokens a step, {estimator.stage.steps:,} steps",
        ),
        (
            "cluster",
            f"{cluster.gpus} {cluster.processes} on {cluster.nodes} node(s), "
            f"{usable_gib(cluster)} usable of {cluster.gpu_memory_gib:.3g} GiB",
        ),
        ("speed", f"of each {estimator.speed}"),
    ]
    if len(estimator.stages) > 1:
        stages = f"of {len(estimator.stages)}, {estimator.stage}, takes the most memory"
        # Below the lines on the whole run, above those on the stage.
        lines.insert(2, ("stage", f"{stages}; parameters, state and hours are of the whole run"))
    served = estimator.served_flops()
    if served is not None:
        lines.append(
            (
                "served",
                f"{served.closed / 1e9:.2f} G FLOPs a token where the gate stays shut, "
                f"{served.open / 1e9:.2f} G where it is open "
                f"({served.open / served.closed:.2f} times the base's)",
            )
        )
    if isinstance(config.method, ScaleMethod):
        spec = estimator.spec
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
        if merged_unsupported_reason(plan, spec, gated=False) is None:
            assert plan.expansion is not None, "SCALE widens its base"
            serving = describe_serving(plan.expansion, spec)
            lines.append(("serving", f"a merged export: {serving}"))
    wrapped: list[str] = []
    for label, text in lines:
        wrapped.append(_wrapped(f"{label:<10}  {text}"))
    return "\n".join(wrapped)


def _training_state(estimator: Estimator) -> str:
    """The training state of each trained parameter: by it the memory of methods can be compared."""
    parameters = estimator.parameters
    size = training_state_bytes(parameters, estimator.deepspeed.dtype)
    each = size / max(1, parameters.trained)
    return (
        f"{size / GIB:.2f} GiB over all ranks, {each:.1f} bytes a trained parameter: weight, "
        "gradient, fp32 copy and moments"
    )


_LAYOUT_COLUMNS = (
    ("ZeRO", ">4"),
    ("tp", ">3"),
    ("ep", ">3"),
    ("checkpointing", "<13"),
    ("keeps", "<9"),
    ("weights", ">7"),
    ("states", ">7"),
    ("activ.", ">6"),
    ("other", ">5"),
    ("total", ">7"),
    ("fits", ">5"),
    ("node GB", ">8"),
    ("net GB", ">7"),
    ("s/step", ">7"),
)
"""The heads of the table of layouts, with alignment and width. Tables in which no ranks share
experts leave out `ep`."""


def _layouts_section(
    estimates: Sequence[Estimate], refused: dict[str, str], estimator: Estimator
) -> str:
    """A table of layouts, with memory in GiB and traffic in GB, and why others are impossible."""
    with_experts = any(estimate.choice.expert_size > 1 for estimate in estimates)
    heads = [head for head, _ in _LAYOUT_COLUMNS]
    lines = [_layout_line(heads, with_experts=with_experts)]
    for estimate in estimates:
        cells = _layout_cells(estimate, estimator.cluster)
        lines.append(_layout_line(cells, with_experts=with_experts))
    for groups, reason in refused.items():
        lines.append(_wrapped(f"  not tp {groups}: {reason}"))
    unsupported = zero3_unsupported_reason(estimator.config)
    if unsupported is not None and estimator.cluster.gpus > 1:
        setting, reason = unsupported
        lines.append(_wrapped(f"  not ZeRO-3: {setting}: {reason}"))
    return "\n".join(lines)


def _layout_line(cells: Sequence[str], *, with_experts: bool) -> str:
    aligned = []
    for text, (head, form) in zip(cells, _LAYOUT_COLUMNS, strict=True):
        if head != "ep" or with_experts:
            aligned.append(format(text, form))
    return " ".join(aligned)


def _layout_cells(estimate: Estimate, cluster: Cluster) -> list[str]:
    """The cells of a row. The larger kinds of memory have columns; the column `other` is the sum of
    the rest.
    """
    choice = estimate.choice
    memory = estimate.memory
    states = memory.gradients + memory.optimizer
    other = memory.total - memory.weights - states - memory.activations
    return [
        str(choice.zero_stage),
        str(choice.tp_size),
        str(choice.expert_size),
        choice.activation_checkpointing,
        "-" if choice.activation_checkpointing == "none" else choice.kept_results,
        f"{memory.weights / GIB:.2f}",
        f"{states / GIB:.2f}",
        f"{memory.activations / GIB:.2f}",
        f"{other / GIB:.2f}",
        f"{memory.total / GIB:.2f}",
        _fits(estimate, cluster),
        f"{estimate.inside_bytes / 1e9:.1f}",
        f"{estimate.between_bytes / 1e9:.1f}",
        f"{estimate.step_s:.2f}",
    ]


def _times_section(
    estimates: Sequence[Estimate],
    refused: dict[str, str],
    recommended: Choice | None,
    estimator: Estimator,
) -> str:
    """The run's own layout and the recommended one, with all figures."""
    own = estimator.own_choice
    lines: list[str] = []
    for estimate in estimates:
        if estimate.choice == own == recommended:
            lines.append(_times_of(estimate, "this run's, recommended", estimator))
        elif estimate.choice == own:
            lines.append(_times_of(estimate, "this run's", estimator))
        elif estimate.choice == recommended:
            lines.append(_times_of(estimate, "recommended", estimator))
    if own.groups in refused:
        lines.append(f"{own} (this run's): IMPOSSIBLE, for the reason above")
    return "\n".join(_wrapped(line) for line in lines)


def _times_of(estimate: Estimate, whose: str, estimator: Estimator) -> str:
    """The time of a step and of the run on one layout, and its memory by kind."""
    cluster = estimator.cluster
    step_s = estimate.step_s
    warning = ""
    if not estimate.fits(cluster):
        warning = (
            f"DOES NOT FIT, it needs {needed_gib(estimate)} of {usable_gib(cluster)} usable GiB: "
        )
    elif not estimate.is_safe(cluster):
        warning = (
            f"TIGHT, less than {MEMORY_ERROR:.0%} of {usable_gib(cluster)} usable GiB are left: "
        )
    tokens_per_second_per_gpu = estimator.tokens_per_step / step_s / cluster.gpus
    whole = timedelta(seconds=round(estimator.run_seconds(estimate.choice)))
    rank = "process" if cluster.on_cpu else "GPU"
    on_host = ""
    if estimate.host_bytes:
        on_host = f", {estimate.host_bytes / GIB:.2f} GiB a {rank} in host memory"
    kinds: list[str] = []
    for kind in fields(Memory):
        kinds.append(f"{kind.name} {getattr(estimate.memory, kind.name) / GIB:.2f}")
    return (
        f"{estimate.choice} ({whose}): {warning}{estimate.micro_batches} micro-batches a step, "
        f"{step_s:.2f} s ({estimate.compute_s:.2f} computing), "
        f"{tokens_per_second_per_gpu:,.0f} tokens/s a {rank}, {whole} in all{on_host}; "
        f"GiB: {', '.join(kinds)}"
    )
