"""The layout that is recommended for a run, and the reason."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.estimate import Estimate
from pipeline.sizing.layouts import Choice, recomputation_rank

_TOLERANCE = 0.03
"""Steps whose times differ by less than this share count as equally fast: the estimates of time are
not more precise."""


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> tuple[Choice | None, str]:
    """The recommended layout, or None if none fits; and the reason.

    It is the fastest layout that fits even if its estimate of memory is too low by MEMORY_ERROR.
    Among equally fast layouts it is the one with the smallest groups (tensor-parallel size times
    expert size), then the least recomputation, then the lowest ZeRO stage.
    """
    if not estimates:
        return None, "no layout is possible; see the reasons given for each"
    safe = [estimate for estimate in estimates if estimate.is_safe(cluster)]
    if not safe:
        return None, _nothing_fits(estimates, cluster)

    # Not the single fastest: differences below the error of the estimate would prefer a complicated
    # layout at random.
    longest = (1 + _TOLERANCE) * min(estimate.step_s for estimate in safe)
    equally_fast = [estimate for estimate in safe if estimate.step_s <= longest]
    best = min(equally_fast, key=_effort)
    reasons = [
        f"{needed_gib(best)} of {usable_gib(cluster)} usable GiB, {best.step_s:.2f} s a step",
    ]
    simpler: list[Estimate] = []
    for other in estimates:
        if _effort(other) < _effort(best) and not other.is_safe(cluster):
            simpler.append(other)
    if simpler:
        nearest = _smallest(simpler)
        reasons.append(f"{nearest.choice} would need {needed_gib(nearest)} GiB")
    if best.choice.zero_stage < 3:
        sharded = best.choice._replace(zero_stage=3)
        for other in estimates:
            if other.choice == sharded:
                more_gb = (other.sent_bytes - best.sent_bytes) / 1e9
                reasons.append(
                    f"ZeRO-3 would send {more_gb:.1f} GB more a step to gather a base that fits"
                )
    return best.choice, "; ".join(reasons)


def _nothing_fits(estimates: Sequence[Estimate], cluster: Cluster) -> str:
    """Why no layout is recommended."""
    least = _smallest(estimates)
    reason = (
        f"nothing fits: {least.choice} needs {needed_gib(least)} GiB of the usable "
        f"{usable_gib(cluster)}"
    )
    if least.fits(cluster):
        reason += f", which leaves less than the {MEMORY_ERROR:.0%} that it may be wrong by"
    return (
        f"{reason}; take more GPUs, a smaller schedule.micro_batch_size, "
        "or ds_configs/zero3_offload.json"
    )


def _smallest(estimates: Sequence[Estimate]) -> Estimate:
    """The estimate with the least memory."""
    return min(estimates, key=lambda estimate: estimate.memory.total)


def _effort(estimate: Estimate) -> tuple[int, int, int]:
    """The order in which layouts are preferred: the smallest is the simplest one."""
    choice = estimate.choice
    return choice.tp_size * choice.expert_size, recomputation_rank(choice), choice.zero_stage


def needed_gib(estimate: Estimate) -> str:
    """The memory that a GPU needs, in GiB, for a message."""
    return f"{estimate.memory.total / GIB:.1f}"


def usable_gib(cluster: Cluster) -> str:
    """The memory of a GPU that a run may use, in GiB, for a message."""
    return f"{cluster.usable_bytes / GIB:.3g}"
