"""The observer interface: the events of the training loop, and the base class of what watches them.

An observer that measures exists on every rank and may use collectives, because all ranks reach the same events in the
same order. An observer that writes exists on rank 0 alone. An observer may add figures to an event; those behind it in
the list see them, so the ones that measure come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipeline.checkpoint.manifest import Position
from pipeline.errors import UserError
from pipeline.health.liveness import Phases
from pipeline.inputs import Inputs
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine
from pipeline.training.validation import HeldoutScore


@dataclass(frozen=True)
class StepEvent:
    """A step is done, validated where that was due, and not yet saved. Step 0 is the model before its first step.

    Attributes:
        tokens: how many tokens the step had, over all ranks.
        seconds: how long it took; None for step 0 and where its samples were skipped.
        figures: what is known of it, by the names that they have in TensorBoard.
    """

    step: int
    tokens: int
    seconds: float | None
    figures: dict[str, float]


@dataclass
class ValidationEvent:
    """The held-out parts were scored. An observer may change the position's learning rate, or ask for the end.

    Attributes:
        position: where the run stands, and goes on from.
        figures: the scores, and what observers add.
        stop: what the run ends with once this step is saved, if it must end.
    """

    position: Position
    scores: Mapping[str, HeldoutScore]
    figures: dict[str, float] = field(default_factory=dict)
    stop: UserError | None = None


class Observer:
    """Is called at every event of a run, and ignores those that it does not override."""

    def on_step_begin(self, step: int) -> None:
        """The step with this number, counted from 1, is about to be computed."""

    def on_step(self, event: StepEvent) -> None:
        """A step is done."""

    def on_validation(self, event: ValidationEvent) -> None:
        """The held-out parts were scored; `on_step` of the same step follows."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint was saved, or, if it is written in the background, copied."""

    def on_rollback(self, step: int) -> None:
        """The run went back to its state after `step` steps: what was reported of later ones is void."""

    def on_end(self, *, finished: bool) -> None:
        """The attempt ends, with the run's last step or before it. A crash may leave no time for this call."""


class Observers(Observer):
    """Several observers as one: each is called at every event, in order."""

    def __init__(self, members: Iterable[Observer]) -> None:
        self.members = tuple(members)

    def on_step_begin(self, step: int) -> None:
        for member in self.members:
            member.on_step_begin(step)

    def on_step(self, event: StepEvent) -> None:
        for member in self.members:
            member.on_step(event)

    def on_validation(self, event: ValidationEvent) -> None:
        for member in self.members:
            member.on_validation(event)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        for member in self.members:
            member.on_checkpoint(step, folder)

    def on_rollback(self, step: int) -> None:
        for member in self.members:
            member.on_rollback(step)

    def on_end(self, *, finished: bool) -> None:
        for member in self.members:
            member.on_end(finished=finished)


@dataclass(frozen=True)
class RunContext:
    """What an observer can be made of, when everything is loaded and the first step has not begun.

    Attributes:
        probe: the rank's first micro-batch.
        position: where the run begins or goes on.
    """

    inputs: Inputs
    engine: Engine
    probe: MicroBatch
    position: Position
    phases: Phases
    device: torch.device
    rank: int


ObserverFactory = Callable[[RunContext], Iterable[Observer]]
"""Makes a run's observers on every rank; `pipeline.observers.make_observers` makes those of the configuration."""
