"""Divergence: which steps are a spike, how many may be skipped, and the report of a run that is
ended.

All decisions follow from the run's position, so a resumed run makes the same ones as a run that
never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NoReturn

import torch.distributed as dist

from pipeline.checkpoint.manifest import Position, StepRecord
from pipeline.config.run import RunConfig, Stability
from pipeline.errors import DivergenceError
from pipeline.files import write_json
from pipeline.parallel.ranks import raise_on_all_ranks

REPORT = "divergence.json"


def remembered(
    recent: Sequence[StepRecord], record: StepRecord, stability: Stability
) -> tuple[StepRecord, ...]:
    """`recent` and `record`, as far back as `find_spike` may need them."""
    return (*recent, record)[-(stability.window + stability.spike_steps) :]


def find_spike(
    recent: Sequence[StepRecord], stability: Stability, gradient_clipping: float
) -> list[StepRecord]:
    """The last `spike_steps` steps, if each is a spike against the `window` steps before them; else
    none.

    That is a loss `loss_increase` nats above their median, or a gradient norm that is clipped and
    `gradient_norm_factor` times their median. A single bad batch is not a spike: the steps after it
    are as before.
    """
    before, last = recent[: -stability.spike_steps], list(recent[-stability.spike_steps :])
    if len(before) < stability.window:
        return []
    highest_loss = highest_norm = float("inf")
    if stability.loss_increase is not None:
        highest_loss = median(record.loss for record in before) + stability.loss_increase
    if stability.gradient_norm_factor is not None:
        norm = median(record.gradient_norm for record in before)
        highest_norm = max(gradient_clipping, norm * stability.gradient_norm_factor)
    is_spike = all(
        record.loss > highest_loss or record.gradient_norm > highest_norm for record in last
    )
    return last if is_spike else []


def check_skipped_steps(config: RunConfig, position: Position) -> None:
    """Ends a run that has skipped more than `stability.max_skipped_steps`; every rank must call
    it.
    """
    skipped, most = len(position.skipped_steps), config.stability.max_skipped_steps
    if skipped > most:
        end_diverged(
            config,
            position,
            f"{skipped} steps were skipped, more than stability.max_skipped_steps {most}",
        )


def end_diverged(config: RunConfig, position: Position, reason: str) -> NoReturn:
    """Writes divergence.json into the run folder and ends the run; every rank must call it."""
    path = config.folder / REPORT
    if dist.get_rank() == 0:
        figures = position.model_dump(
            mode="json",
            include={
                "step",
                "skipped_steps",
                "recomputed_steps",
                "rollbacks",
                "learning_rate_factor",
            },
        )
        recent = [record._asdict() for record in position.recent]
        settings = config.stability.model_dump(mode="json")
        write_json(path, {**figures, "reason": reason, "settings": settings, "recent": recent})
    raise_on_all_ranks(
        DivergenceError(
            f"step {position.step}: {reason}; nothing was saved since the last checkpoint, from "
            "which the same command "
            f"resumes; lower schedule.learning_rate, or examine these steps' samples: {path} has "
            "the figures"
        )
    )
