"""What a run tells of itself beside its losses."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipeline.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Metrics(Section):
    """What speed is measured against, and how often the log has a line of it (docs/metrics.md)."""

    peak_tflops: PositiveFloat | None = Field(
        default=None,
        description="of one device, dense, in the precision of the run: what MFU is a share of; default: NVIDIA's "
        "figure for 16 bits, where the GPU is a known one. Without either there is no MFU",
    )
    log_every_s: PositiveFloat = 10.0
    """at least so long between two lines of progress"""


class Profile(Section):
    """Which steps torch.profiler traces, into `<folder>/profile`; all others are as without it."""

    steps: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="the first and the last, counted from 1; without, none"
    )
    ranks: list[NonNegativeInt] = Field(default=[0], description="those that write a trace, one file each")

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Profile:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(f"steps: the last, {self.steps[1]}, comes before the first, {self.steps[0]}")
        return self
