"""Which layout to take, and why, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.estimation.cluster import GIB, Cluster
from pipeline.estimation.estimate import CHECKPOINTINGS, Choice, Estimate

TOLERANCE = 0.03
"""Steps that differ by less than this share are equally fast here: the estimate is no better."""


@dataclass(frozen=True)
class Recommendation:
    """The layout to take, None where none fits, and the reason."""

    choice: Choice | None
    reason: str


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> Recommendation:
    """The fastest layout that fits; among equally fast ones the simplest, that is the one with the smallest
    tensor-parallel size, then the least recomputation, then the lowest ZeRO stage."""
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
        near = min((one for one in simpler if not one.fits(cluster)), key=lambda one: one.memory.total)
        reasons.append(f"{near.choice} would need {_gib(near)} GiB")
    slower = [estimate for estimate in simpler if estimate.fits(cluster)]
    if slower:
        near = min(slower, key=lambda estimate: estimate.step_s)
        reasons.append(f"{near.choice} would take {near.step_s:.2f} s a step")
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
