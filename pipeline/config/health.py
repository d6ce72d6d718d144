"""The sections `preflight` and `watchdog`: the machines before a run, and the ranks during it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.config.reading import Seconds, Section


class Preflight(Section):
    """Checks of the allocation before the first step; they take seconds."""

    enabled: bool = True
    """whether they are made"""
    min_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    """lowest rate of a rank in an all-reduce; default: 0.5 on GPUs, 0.001 on CPUs"""
    slow_factor: Annotated[float, Field(gt=1)] | None = None
    """largest time of a matrix product on a rank, as a multiple of the others'; default: no limit,
    the log names the slowest"""


class WatchdogSettings(Section):
    """When a run counts as lost or hung: it then ends, so that a launcher can restart it."""

    beat_every_s: Seconds = 5.0
    """seconds between a rank's heartbeats; longer above 500 ranks"""
    dead_after_s: Seconds = 60.0
    """seconds without a heartbeat until a rank counts as lost; a process that ends is noticed at
    once"""
    # Of a phase, not a step: a step may include a validation or a save, which take minutes.
    hung_after_s: Seconds = 600.0
    """seconds without any rank leaving its phase (data, forward, backward, step) until the run
    counts as hung"""
    slow_after_s: Seconds = 1800.0
    """the same for the start, a validation and a save"""
