"""The size of checkpoints, and the disk space that a run needs for them."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.errors import PreflightError
from pipeline.sizing.parameters import Parameters
from pipeline.sizing.training_state import optimizer_state_bytes


def checkpoint_bytes(parameters: Parameters) -> int:
    """The size of one checkpoint: the optimizer's states, which include the trained weights.

    The base is not in it. Random states, padding and names are left out: in large runs they are a
    few percent at most.
    """
    return optimizer_state_bytes(parameters)


def most_checkpoints(config: RunConfig) -> int:
    """The largest number of checkpoints on the disk at once.

    They are the newest ones, the ones that are kept for good, and the one that is being written.
    """
    settings = config.checkpoints
    kept_for_good = 0
    if settings.keep_every_steps is not None:
        kept_for_good = config.schedule.steps // settings.keep_every_steps
    # A rollback returns to the newest checkpoint from before the spikes: it is kept, and all newer
    # ones.
    before_spike = 1 + math.ceil(config.stability.rollback_steps / settings.every_steps)
    return max(settings.keep_last, before_spike) + kept_for_good + 1


def checkpoints_bytes(config: RunConfig, parameters: Parameters) -> int:
    """The disk space that a run needs: the most checkpoints at once, and a tenth more."""
    return int(1.1 * checkpoint_bytes(parameters) * most_checkpoints(config))


def no_room(folder: Path, needed_bytes: int, free_bytes: int) -> PreflightError:
    """The error for a `folder` without enough disk space for the checkpoints to come."""
    return PreflightError(
        f"{folder}: the checkpoints need {needed_bytes / 1e9:.3g} GB more, "
        f"found {free_bytes / 1e9:.3g} GB free; "
        "make room, lower checkpoints.keep_last, or set folder to another disk"
    )
