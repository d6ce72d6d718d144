"""Divergence: which steps are a spike, how many may be skipped, and the report at the end.

All decisions follow from the run's position, so a resumed run makes the same ones as a run that
never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NoReturn

import torch.distributed as dist

from pipeline.checkpoint.position import Position, StepRecord
from pipeline.config.run import RunConfig
from pipeline.config.stability import Stability
from pipeline.errors import DivergenceError
from pipeline.files.json_files import write_json
from pipeline.parallel.ranks import raise_on_all_ranks

REPORT = "divergence.json"
_REPORTED = {"step", "skipped_steps", "recomputed_steps", "rollbacks", "learning_rate_factor"}
"""What divergence.json says of the run's position."""


def find_spike(
    recent: Sequence[StepRecord],
    stability: Stability,
    gradient_clipping: float,
    *,
    first_step: int = 0,
) -> list[StepRecord]:
    """The last `spike_steps` steps, if each is a spike against the `window` steps before them.

    A step is a spike if its loss is `loss_increase` nats above their median, or its gradient norm
    is clipped and is `gradient_norm_factor` times their median. A single bad batch is no spike,
    because the steps after it are as before. Steps up to `first_step`, of earlier stages, do not
    count: other data has another loss. Returns an empty list if there is no spike.
    """
    recent = [record for record in recent if record.step > first_step]
    before = recent[: -stability.spike_steps]
    last = list(recent[-stability.spike_steps :])
    if len(before) < stability.window:
        return []
    highest_loss = float("inf")
    if stability.loss_increase is not None:
        # A median, which the few steps of an earlier spike in the window do not move.
        highest_loss = median(record.loss for record in before) + stability.loss_increase
    highest_norm = float("inf")
    if stability.gradient_norm_factor is not None:
        usual_norm = median(record.gradient_norm for record in before)
        # A norm that is not clipped harms nothing, however unusual.
        highest_norm = max(gradient_clipping, usual_norm * stability.gradient_norm_factor)
    for record in last:
        if record.loss <= highest_loss and record.gradient_norm <= highest_norm:
            return []
    return last


def check_skipped_steps(config: RunConfig, position: Position) -> None:
    """Ends a run that has skipped too many steps; every rank must call it.

    Raises:
        DivergenceError: on rank 0, where more than `stability.max_skipped_steps` were skipped. The
            other ranks raise SystemExit.
    """
    skipped = len(position.skipped_steps)
    limit = config.stability.max_skipped_steps
    if skipped > limit:
        reason = f"{skipped} steps were skipped, more than stability.max_skipped_steps {limit}"
        end_diverged(config, position, reason)


def end_diverged(config: RunConfig, position: Position, reason: str) -> NoReturn:
    """Writes divergence.json into the run folder and ends the run; every rank must call it.

    Raises:
        DivergenceError: on rank 0. The other ranks raise SystemExit.
    """
    path = config.folder / REPORT
    if dist.get_rank() == 0:
        report = position.model_dump(mode="json", include=_REPORTED)
        report["reason"] = reason
        report["settings"] = config.stability.model_dump(mode="json")
        report["recent"] = [record._asdict() for record in position.recent]
        write_json(path, report)
    raise_on_all_ranks(
        DivergenceError(
            f"step {position.step}: {reason}; nothing was saved since the last checkpoint, from "
            "which the same command resumes; lower schedule.learning_rate, or examine these steps' "
            f"samples: {path} has the figures"
        )
    )
