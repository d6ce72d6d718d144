"""What is measured before the first step, and what is accepted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.config.section import Section

_MIN_GB_PER_S = {"cuda": 0.5, "cpu": 0.001}
_SLOW_FACTOR = {"cuda": 1.5, "cpu": 20.0}


class Preflight(Section):
    """What is measured on the allocation before the first step, in seconds, and what is accepted."""

    enabled: bool = True
    """false: start without it"""
    min_gb_per_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="of the slowest all-reduce, by what a rank sends; 0.5 on GPUs, 0.001 on CPUs",
    )
    slow_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="how many times as long as the others' a rank's matrix product may take; 1.5 on GPUs, 20 on CPUs, "
        "whose cores may be shared",
    )
    disk_margin_fraction: Annotated[float, Field(ge=0)] = 0.1
    """room that is asked for beyond the checkpoints themselves"""

    def min_gb_per_s_on(self, device_type: str) -> float:
        """The floor on `cuda` or `cpu`."""
        return _MIN_GB_PER_S[device_type] if self.min_gb_per_s is None else self.min_gb_per_s

    def slow_factor_on(self, device_type: str) -> float:
        """The limit on `cuda` or `cpu`."""
        return _SLOW_FACTOR[device_type] if self.slow_factor is None else self.slow_factor
