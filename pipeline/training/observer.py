"""The events of the training loop, and the base class of their observers.

An observer that measures exists on every rank and may use collectives: all ranks reach the same
events in one order. It may add figures to an event, which the observers after it see. An observer
that writes exists on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.checkpoint.manifest import Position
from pipeline.errors import UserError
from pipeline.training.validation import HeldoutScore


@dataclass
class StepEvent:
    """A finished step, after its validation if it has one, and before its save. Step 0 is the
    untrained model.
    """

    step: int
    tokens: int
    """over all ranks"""
    seconds: float | None
    """None for step 0 and where its samples were skipped"""
    figures: dict[str, float]
    """the values to log, by their names in metrics.jsonl"""


@dataclass
class ValidationEvent:
    """Scores of the held-out parts. An observer may change the position's learning rate, or end the
    run.
    """

    position: Position
    """where the run stands; it continues from here"""
    scores: Mapping[str, HeldoutScore]
    figures: dict[str, float] = field(default_factory=dict)
    """the scores, and what observers add"""
    stop: UserError | None = None
    """if set, the run saves this step and ends with this error"""


class Observer:
    """Receives the events of a run; a subclass overrides the methods that it needs."""

    def on_step(self, event: StepEvent) -> None:
        """A step is finished."""

    def on_validation(self, event: ValidationEvent) -> None:
        """The held-out parts were scored; `on_step` of the same step follows."""

    def on_rollback(self, step: int) -> None:
        """The run went back to its state after `step` steps: what was reported for later steps is
        void.
        """

    def on_end(self, *, finished: bool) -> None:
        """The attempt ends, with the run's last step or before it. It may not be called after a
        crash.
        """
