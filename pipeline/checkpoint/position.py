"""Where a run stands, and what it must remember to go on as if it had never stopped."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class StepRecord(NamedTuple):
    """What the rule for spikes looks at: a step's number, its loss, and the norm of its gradient before clipping."""

    step: int
    loss: float
    gradient_norm: float


class Position(BaseModel):
    """How far a run is, and what befell it on the way; it changes by making another one.

    A step's samples follow from its number alone, whatever happened before it.

    Attributes:
        step, tokens_seen: the steps that are behind the run, those that were skipped among them.
        seconds: the time spent in training steps, over all attempts.
        skipped_steps: the numbers, from 1, of the steps that must not change the weights: no number came out of them,
            or a rollback set them aside.
        recomputed_steps: how many were computed twice, and were sound the second time.
        rollbacks: how often the run went back to a checkpoint because of a spike.
        learning_rate_factor: what the schedule's rate is multiplied with; a forgetting budget lowers it.
        initial_nll_per_token: each held-out corpus's before the first step: forgetting is measured from there.
        recent: the last steps that changed the weights, oldest first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    skipped_steps: tuple[int, ...] = ()
    recomputed_steps: int = 0
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    initial_nll_per_token: dict[str, float] = {}
    recent: tuple[StepRecord, ...] = ()

    def changed(self, **changes: object) -> Position:
        """The same with some attributes replaced."""
        return self.model_copy(update=changes)

    def skipping(self, *steps: int) -> Position:
        """The same with `steps` among those that are skipped."""
        return self.changed(skipped_steps=tuple(sorted({*self.skipped_steps, *steps})))
