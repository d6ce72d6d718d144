"""An estimate for a person, and for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.estimation.cluster import GIB, Cluster
from pipeline.estimation.estimate import Choice, Estimate, Estimator
from pipeline.estimation.memory import Memory
from pipeline.estimation.recommendation import Recommendation, recommend

_KINDS = [kind.name for kind in fields(Memory)]


@dataclass(frozen=True)
class Report:
    """Everything that `tools/estimate.py` prints."""

    estimator: Estimator
    estimates: Sequence[Estimate]
    refused: Mapping[Choice, str]
    recommendation: Recommendation


def make_report(estimator: Estimator) -> Report:
    """Estimates every layout and chooses one."""
    estimates, refused = estimator.estimate_all()
    return Report(estimator, estimates, refused, recommend(estimates, estimator.cluster))


def as_values(report: Report) -> dict[str, Any]:
    """The report as JSON values: bytes, seconds, FLOPs."""
    estimator = report.estimator
    flops = estimator.flops_per_token("none")
    steps = estimator.config.schedule.steps
    return {
        "cluster": asdict(estimator.cluster),
        "parameters": asdict(estimator.parameters),
        "flops_per_token": {"matrix": flops.matrix, "attention": flops.attention, "total": flops.total},
        "steps": steps,
        "tokens_per_step": estimator.tokens_per_step,
        "own": estimator.own_choice._asdict(),
        "recommended": report.recommendation.choice._asdict() if report.recommendation.choice else None,
        "reason": report.recommendation.reason,
        "layouts": [_layout(estimate, estimator.cluster, steps) for estimate in report.estimates],
        "refused": [{**choice._asdict(), "reason": reason} for choice, reason in report.refused.items()],
    }


def _layout(estimate: Estimate, cluster: Cluster, steps: int) -> dict[str, Any]:
    return {
        **estimate.choice._asdict(),
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total},
        "host_bytes": estimate.host_bytes,
        "fits": estimate.fits(cluster),
        "micro_batches_per_step": estimate.micro_batches,
        "traffic_per_step": [asdict(one) for one in estimate.traffic],
        "compute_s": estimate.compute_s,
        "step_s": estimate.step_s,
        "run_s": estimate.step_s * steps,
    }


def as_text(report: Report) -> str:
    """The report as lines: the model, its layouts in a table, the messages of the run's own, the recommendation."""
    lines = [*_model_lines(report.estimator), "", *_table_lines(report)]
    refused = {choice.tp_size: reason for choice, reason in report.refused.items()}
    lines += [f"  not tp {tp_size}: {reason}" for tp_size, reason in refused.items()]
    chosen = {report.estimator.own_choice: "this run's", report.recommendation.choice: "recommended"}
    for estimate in report.estimates:
        if estimate.choice in chosen:
            lines += ["", f"{estimate.choice} ({chosen[estimate.choice]})", *_detail_lines(estimate, report.estimator)]
    recommended = report.recommendation.choice
    lines += ["", f"recommended: {recommended or 'no layout'}: {report.recommendation.reason}"]
    return "\n".join(lines)


def _model_lines(estimator: Estimator) -> list[str]:
    parameters, cluster, flops = estimator.parameters, estimator.cluster, estimator.flops_per_token("none")
    share = parameters.trained / parameters.total
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    return [
        f"parameters  base {parameters.base:,}, expansion {parameters.expansion:,}, "
        f"trained {parameters.trained:,} ({share:.1%})",
        f"FLOPs       {flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
        f"{flops.attention / 1e9:.2f} attention)",
        f"batch       {estimator.tokens_per_step:,} tokens a step, {estimator.config.schedule.steps:,} steps",
        f"cluster     {cluster.gpus} GPUs on {nodes} node(s), {cluster.usable_bytes / GIB:.0f} usable of "
        f"{cluster.gpu_memory_gib:.0f} GiB, {cluster.peak_tflops:.0f} TFLOP/s at MFU {cluster.mfu:.2f}",
    ]


def _table_lines(report: Report) -> list[str]:
    cluster = report.estimator.cluster
    head = f"{'ZeRO':>4} {'tp':>3} {'checkpointing':<13} " + " ".join(f"{kind:>11}" for kind in _KINDS)
    lines = [f"{head} {'total GiB':>10} {'fits':>4} {'in node GB':>10} {'network GB':>10} {'s/step':>8}"]
    for estimate in report.estimates:
        stage, tp_size, checkpointing = estimate.choice
        kinds = " ".join(f"{getattr(estimate.memory, kind) / GIB:>11.2f}" for kind in _KINDS)
        lines.append(
            f"{stage:>4} {tp_size:>3} {checkpointing:<13} {kinds} {estimate.memory.total / GIB:>10.2f} "
            f"{'yes' if estimate.fits(cluster) else 'no':>4} {estimate.inside_bytes / 1e9:>10.2f} "
            f"{estimate.between_bytes / 1e9:>10.2f} {estimate.step_s:>8.2f}"
        )
    return lines


def _detail_lines(estimate: Estimate, estimator: Estimator) -> list[str]:
    steps = estimator.config.schedule.steps
    per_gpu = estimator.tokens_per_step / estimate.step_s / estimator.cluster.gpus
    lines = [
        f"  {one.purpose:<19} {one.collective:<14} over {one.group_size:>3}: {one.inside_bytes / 1e9:8.2f} GB inside a "
        f"node, {one.between_bytes / 1e9:8.2f} GB between nodes, a GPU and step"
        for one in estimate.traffic
    ]
    if estimate.host_bytes:
        lines.append(f"  {estimate.host_bytes / GIB:.2f} GiB a GPU in host memory")
    lines.append(
        f"  {estimate.micro_batches} micro-batches a step, {estimate.step_s:.2f} s ({estimate.compute_s:.2f} computing)"
        f", {per_gpu:,.0f} tokens/s a GPU, {steps * estimate.step_s / 3600:.1f} h for {steps:,} steps"
    )
    return lines
