"""Recommends a layout, and prints estimates as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from pipeline.config.method import ScaleMethod
from pipeline.model.stock_model import describe_serving, why_not_stock
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, Cluster
from pipeline.sizing.estimate import CHECKPOINTINGS, Choice, Estimate, Estimator
from pipeline.sizing.memory import Memory

TOLERANCE = 0.03
"""Steps whose times differ by less than this share count as equally fast: the estimate is not more precise."""


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> tuple[Choice | None, str]:
    """The fastest layout that fits, and the reason; None where none fits.

    Among equally fast ones it is the one with the smallest tensor-parallel size, then the least recomputation, then the
    lowest ZeRO stage.
    """
    if not estimates:
        return None, "no layout is possible; see the reasons given for each"
    fitting = [estimate for estimate in estimates if estimate.fits(cluster)]
    usable = f"{cluster.usable_bytes / GIB:.0f}"
    if not fitting:
        least = min(estimates, key=lambda estimate: estimate.memory.total)
        return None, (
            f"nothing fits: {least.choice} needs {_gib(least)} GiB of the usable {usable}; "
            "take more GPUs, a smaller schedule.micro_batch_size, or ds_configs/zero3_offload.json"
        )
    fastest = min(estimate.step_s for estimate in fitting)
    best = min((estimate for estimate in fitting if estimate.step_s <= fastest * (1 + TOLERANCE)), key=_effort)
    reasons = [f"{_gib(best)} of {usable} usable GiB, {best.step_s:.2f} s a step"]
    too_large = [other for other in estimates if _effort(other) < _effort(best) and not other.fits(cluster)]
    if too_large:
        nearest = min(too_large, key=lambda estimate: estimate.memory.total)
        reasons.append(f"{nearest.choice} would need {_gib(nearest)} GiB")
    for other in estimates:
        if best.choice.zero_stage < 3 and other.choice == best.choice._replace(zero_stage=3):
            more_gb = (other.inside_bytes + other.between_bytes - best.inside_bytes - best.between_bytes) / 1e9
            reasons.append(f"ZeRO-3 would send {more_gb:.1f} GB more a step to gather a base that fits")
    return best.choice, "; ".join(reasons)


def _effort(estimate: Estimate) -> tuple[int, int, int]:
    choice = estimate.choice
    return choice.tp_size, CHECKPOINTINGS.index(choice.activation_checkpointing), choice.zero_stage


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f}"


def report(estimator: Estimator) -> tuple[str, Choice | None]:
    """The model, a table of layouts, the time of the run's own and of the recommended one; and the recommended one."""
    estimates, refused = estimator.estimate_all()
    recommended, reason = recommend(estimates, estimator.cluster)
    lines = [*_model_lines(estimator), "", *_table_lines(estimates, estimator.cluster)]
    lines += [f"  not tp {tp_size}: {reason}" for tp_size, reason in refused.items()]
    chosen = {estimator.own_choice: "this run's", recommended: "recommended"}
    lines += ["", *(_detail(one, chosen[one.choice], estimator) for one in estimates if one.choice in chosen)]
    lines += ["", f"recommended: {recommended or 'no layout'}: {reason}"]
    return "\n".join(lines), recommended


def _model_lines(estimator: Estimator) -> Iterator[str]:
    cluster, config, spec = estimator.cluster, estimator.config, estimator.spec
    flops = estimator.flops_per_token("none")
    yield f"parameters  {estimator.parameters}"
    yield (
        f"FLOPs       {flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
        f"{flops.attention / 1e9:.2f} attention)"
    )
    yield f"batch       {estimator.tokens_per_step:,} tokens a step, {config.schedule.steps:,} steps"
    yield (
        f"cluster     {cluster.gpus} GPUs on {cluster.nodes} node(s), {cluster.usable_bytes / GIB:.0f} usable of "
        f"{cluster.gpu_memory_gib:.0f} GiB, {cluster.peak_tflops:.0f} TFLOP/s at MFU {cluster.mfu:.2f}"
    )
    if isinstance(config.method, ScaleMethod):
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
        if why_not_stock(plan, spec, gated=False) is None:
            yield f"serving     a stock export: {describe_serving(plan.expansion, spec)}"


def _table_lines(estimates: Sequence[Estimate], cluster: Cluster) -> Iterator[str]:
    kinds = [kind.name for kind in fields(Memory)]
    head = f"{'ZeRO':>4} {'tp':>3} {'checkpointing':<13} " + " ".join(f"{kind:>11}" for kind in kinds)
    yield f"{head} {'total GiB':>10} {'fits':>4} {'in node GB':>10} {'network GB':>10} {'s/step':>8}"
    for estimate in estimates:
        stage, tp_size, checkpointing = estimate.choice
        held = " ".join(f"{getattr(estimate.memory, kind) / GIB:>11.2f}" for kind in kinds)
        yield (
            f"{stage:>4} {tp_size:>3} {checkpointing:<13} {held} {estimate.memory.total / GIB:>10.2f} "
            f"{'yes' if estimate.fits(cluster) else 'no':>4} {estimate.inside_bytes / 1e9:>10.2f} "
            f"{estimate.between_bytes / 1e9:>10.2f} {estimate.step_s:>8.2f}"
        )


def _detail(estimate: Estimate, whose: str, estimator: Estimator) -> str:
    steps, step_s = estimator.config.schedule.steps, estimate.step_s
    per_gpu = estimator.tokens_per_step / step_s / estimator.cluster.gpus
    on_host = f", {estimate.host_bytes / GIB:.2f} GiB a GPU in host memory" if estimate.host_bytes else ""
    return (
        f"{estimate.choice} ({whose}): {estimate.micro_batches} micro-batches a step, {step_s:.2f} s "
        f"({estimate.compute_s:.2f} computing), {per_gpu:,.0f} tokens/s a GPU, {steps * step_s / 3600:.1f} h{on_host}"
    )
