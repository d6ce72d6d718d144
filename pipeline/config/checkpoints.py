"""The section `checkpoints`: when a run saves, and what it keeps."""

from __future__ import annotations

from pydantic import model_validator

from pipeline.config.reading import PositiveInt, Section


class CheckpointSettings(Section):
    """When to save, and which checkpoints to keep."""

    every_steps: PositiveInt = 500
    """number of steps from one checkpoint to the next; the end and a signal save one, too"""
    keep_last: PositiveInt = 2
    """number of the newest checkpoints that are kept; more are kept while none of them lies before
    the last `stability.spike_steps` steps"""
    keep_every_steps: PositiveInt | None = None
    """steps whose multiples are kept for good; default: no checkpoint is kept for good"""
    asynchronous: bool = False
    """whether training continues while a copy in host memory is written"""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> CheckpointSettings:
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps must be a multiple of every_steps {self.every_steps}"
            )
        return self
