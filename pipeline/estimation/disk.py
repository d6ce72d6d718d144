"""What a run's checkpoints take on the disk."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.errors import PreflightError
from pipeline.estimation.parameters import Parameters

_MASTER_AND_MOMENTS_BYTES = 12
"""An element's fp32 master weight and two Adam moments."""


def checkpoint_bytes(parameters: Parameters) -> int:
    """One checkpoint: the optimizer's state of what trains, of which the weights are made again when it is read.

    The base is not in it. What the ranks add (random states, padding, names) stays below a few percent in runs that are
    large enough to need a forecast.
    """
    return parameters.trained * _MASTER_AND_MOMENTS_BYTES


def most_checkpoints(config: RunConfig) -> int:
    """How many lie on the disk at once: the last, those that stay for good, and one that is being written."""
    for_good = config.schedule.steps // (config.checkpoints.keep_every_steps or config.schedule.steps + 1)
    return config.checkpoints.keep_last + for_good + 1


def checkpoints_bytes(config: RunConfig, parameters: Parameters) -> int:
    """The room to ask for in all: for the most checkpoints that lie there at once, and the margin."""
    most = checkpoint_bytes(parameters) * most_checkpoints(config)
    return int(most * (1 + config.preflight.disk_margin_fraction))


def held_bytes(folder: Path) -> int:
    """What the files in `folder` take already."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def no_room(folder: Path, needed_bytes: int, free_bytes: int) -> PreflightError:
    """What to tell the user where `folder` has not the room that the checkpoints still need."""
    return PreflightError(
        f"{folder}: the checkpoints need {needed_bytes / 1e9:.3g} GB more, found {free_bytes / 1e9:.3g} GB free; make "
        "room, lower checkpoints.keep_last, or set folder to another disk"
    )
