"""The sections `preflight` and `watchdog`: the machines before a run, and the ranks during it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.config.reading import PositiveFloat, Section


class Preflight(Section):
    """Checks of the allocation before the first step; they take seconds."""

    enabled: bool = True
    """whether the allocation is checked before the first step"""
    min_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    """lowest rate at which a rank sends in an all-reduce; default: 0.5 on GPUs, 0.001 on CPUs"""
    slow_factor: Annotated[float, Field(gt=1)] | None = None
    """times that a matrix product may take longer on one rank than on the others; default: no
    limit, the log names the slowest"""


class WatchdogSettings(Section):
    """When a run counts as lost or hung: it then ends, so that a launcher can restart it."""

    beat_every_s: PositiveFloat = 5.0
    """seconds between two heartbeats of a rank; longer with more than 500 ranks"""
    dead_after_s: PositiveFloat = 60.0
    """seconds without a heartbeat after which a rank counts as lost; the end of a process is
    noticed immediately"""
    # Of a phase, not a step: a step may include a validation or a save, which take minutes.
    hung_after_s: PositiveFloat = 600.0
    """seconds without any rank leaving its phase (data, forward, backward, step) after which the
    run counts as hung"""
    slow_after_s: PositiveFloat = 1800.0
    """the same for the start, a validation and a save"""
