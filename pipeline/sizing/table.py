"""Recommends a layout, and formats estimates as a table or as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.config.method import ScaleMethod
from pipeline.model.stock_model import describe_serving, why_not_stock
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, Cluster
from pipeline.sizing.estimate import CHECKPOINTINGS, Choice, Estimate, Estimator
from pipeline.sizing.memory import Memory

TOLERANCE = 0.03
"""Steps whose times differ by less than this share count as equally fast: the estimate is not more precise."""


@dataclass(frozen=True)
class Recommendation:
    """The recommended layout, or None where none fits, and the reason."""

    choice: Choice | None
    reason: str


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> Recommendation:
    """The fastest layout that fits.

    Among equally fast ones it is the one with the smallest tensor-parallel size, then the least recomputation, then the
    lowest ZeRO stage.
    """
    if not estimates:
        return Recommendation(None, "no layout is possible; see the reasons given for each")
    fitting = [estimate for estimate in estimates if estimate.fits(cluster)]
    if not fitting:
        least = min(estimates, key=lambda estimate: estimate.memory.total)
        return Recommendation(
            None,
            f"nothing fits: {least.choice} needs {_gib(least)} GiB of the usable {cluster.usable_bytes / GIB:.0f}; "
            "take more GPUs, a smaller schedule.micro_batch_size, or ds_configs/zero3_offload.json",
        )
    fastest = min(estimate.step_s for estimate in fitting)
    best = min((estimate for estimate in fitting if estimate.step_s <= fastest * (1 + TOLERANCE)), key=_effort)
    return Recommendation(best.choice, _reason(best, estimates, cluster))


def _effort(estimate: Estimate) -> tuple[int, int, int]:
    choice = estimate.choice
    return choice.tp_size, CHECKPOINTINGS.index(choice.activation_checkpointing), choice.zero_stage


def _reason(best: Estimate, estimates: Sequence[Estimate], cluster: Cluster) -> str:
    reasons = [f"{_gib(best)} of {cluster.usable_bytes / GIB:.0f} usable GiB, {best.step_s:.2f} s a step"]
    simpler = [estimate for estimate in estimates if _effort(estimate) < _effort(best)]
    if any(not estimate.fits(cluster) for estimate in simpler):
        nearest = min((other for other in simpler if not other.fits(cluster)), key=lambda other: other.memory.total)
        reasons.append(f"{nearest.choice} would need {_gib(nearest)} GiB")
    slower = [estimate for estimate in simpler if estimate.fits(cluster)]
    if slower:
        nearest = min(slower, key=lambda estimate: estimate.step_s)
        reasons.append(f"{nearest.choice} would take {nearest.step_s:.2f} s a step")
    if best.choice.zero_stage < 3:
        zero3 = best.choice._replace(zero_stage=3)
        for other in estimates:
            if other.choice == zero3:
                more = _sent_gb(other) - _sent_gb(best)
                reasons.append(f"ZeRO-3 would send {more:.1f} GB more a step to gather a base that fits")
    return "; ".join(reasons)


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f}"


def _sent_gb(estimate: Estimate) -> float:
    return (estimate.inside_bytes + estimate.between_bytes) / 1e9


_KINDS = [kind.name for kind in fields(Memory)]


@dataclass(frozen=True)
class Report:
    """What `tools/estimate.py` prints."""

    estimator: Estimator
    estimates: Sequence[Estimate]
    refused: Mapping[Choice, str]
    recommendation: Recommendation


def make_report(estimator: Estimator) -> Report:
    """Estimates every layout and recommends one."""
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
        "traffic_per_step": [asdict(traffic) for traffic in estimate.traffic],
        "compute_s": estimate.compute_s,
        "step_s": estimate.step_s,
        "run_s": estimate.step_s * steps,
    }


def as_text(report: Report) -> str:
    """The report as lines: the model, a table of layouts, the traffic of the run's own layout, the recommendation."""
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
    cluster, flops = estimator.cluster, estimator.flops_per_token("none")
    return [
        f"parameters  {estimator.parameters}",
        f"FLOPs       {flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
        f"{flops.attention / 1e9:.2f} attention)",
        f"batch       {estimator.tokens_per_step:,} tokens a step, {estimator.config.schedule.steps:,} steps",
        f"cluster     {cluster.gpus} GPUs on {cluster.nodes} node(s), {cluster.usable_bytes / GIB:.0f} usable of "
        f"{cluster.gpu_memory_gib:.0f} GiB, {cluster.peak_tflops:.0f} TFLOP/s at MFU {cluster.mfu:.2f}",
        *_serving_line(estimator),
    ]


def _serving_line(estimator: Estimator) -> Iterator[str]:
    """What servers make of the widths, if the model can leave as an ordinary one."""
    config, spec = estimator.config, estimator.spec
    if isinstance(config.method, ScaleMethod):
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
        if why_not_stock(plan, spec, gated=False) is None:
            yield f"serving     a stock export: {describe_serving(plan.expansion, spec)}"


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
        f"  {traffic.purpose:<19} {traffic.collective:<14} over {traffic.group_size:>3}: "
        f"{traffic.inside_bytes / 1e9:8.2f} GB inside a node, {traffic.between_bytes / 1e9:8.2f} GB between nodes, "
        "a GPU and step"
        for traffic in estimate.traffic
    ]
    if estimate.host_bytes:
        lines.append(f"  {estimate.host_bytes / GIB:.2f} GiB a GPU in host memory")
    lines.append(
        f"  {estimate.micro_batches} micro-batches a step, {estimate.step_s:.2f} s ({estimate.compute_s:.2f} computing)"
        f", {per_gpu:,.0f} tokens/s a GPU, {steps * estimate.step_s / 3600:.1f} h for {steps:,} steps"
    )
    return lines
