"""The section `checkpoints`: when a run saves, and what it keeps."""

from __future__ import annotations

from pydantic import model_validator

from pipeline.config.reading import PositiveInt, Section


class CheckpointSettings(Section):
    """When to save, and which checkpoints to keep."""

    every_steps: PositiveInt = 500
    """steps between checkpoints; one is also saved at the end and after a signal"""
    keep_last: PositiveInt = 2
    """newest checkpoints that are kept; more where a rollback needs an older one"""
    keep_every_steps: PositiveInt | None = None
    """checkpoints of these multiples are never deleted; default: none"""
    asynchronous: bool = False
    """writes a checkpoint from host memory while training continues"""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> CheckpointSettings:
        # Only a checkpoint that is saved can be kept.
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps must be a multiple of every_steps {self.every_steps}"
            )
        return self
