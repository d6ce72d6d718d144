"""The events of the training loop, and the base class of their observers.

An observer that measures exists on every rank and may use collectives: all ranks reach the same
events in one order. It may add figures to an event, which the observers after it see. An observer
that writes exists on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.checkpoint.position import Position
from pipeline.errors import UserError
from pipeline.training.validation import HeldoutScore


@dataclass
class StepEvent:
    """A finished step, after its validation if it has one, and before its save.

    Step 0 is the untrained model.

    Attributes:
        tokens: the tokens of the step, over all ranks.
        seconds: None for step 0, and where the step's samples were skipped.
        figures: the values to log, by their names in metrics.jsonl.
        texts: texts to show, by their names in TensorBoard.
    """

    step: int
    tokens: int
    seconds: float | None
    figures: dict[str, float]
    texts: dict[str, str] = field(default_factory=dict)


@dataclass
class ValidationEvent:
    """Scores of the held-out parts.

    Attributes:
        position: where the run stands. An observer may replace it, to change the learning rate; the
            run continues from what it is after the last observer.
        figures: the scores, and what observers add.
        texts: texts to show, which observers add.
        stop: an observer may set it; the run then saves this step and ends with this error.
    """

    position: Position
    scores: Mapping[str, HeldoutScore]
    figures: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    stop: UserError | None = None


class Observer:
    """Receives the events of a run; a subclass overrides the methods that it needs."""

    def on_step(self, event: StepEvent) -> None:
        """A step is finished."""

    def on_validation(self, event: ValidationEvent) -> None:
        """The held-out parts were scored; `on_step` of the same step follows."""

    def on_rollback(self, step: int) -> None:
        """The run went back to its state after `step` steps; reports of later steps are void."""

    def on_end(self, *, finished: bool) -> None:
        """The attempt ends, with the run's last step or before it; not called after a crash."""
