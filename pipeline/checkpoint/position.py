"""Where a run stands: its step, the tokens so far, and what later decisions follow from."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.config.run import RunConfig
from pipeline.config.stability import Stability


class ManifestSection(BaseModel):
    """A part of a checkpoint's manifest."""

    # An unknown entry is refused: it is damage, or of a version that this one cannot resume.
    model_config = ConfigDict(extra="forbid", frozen=True)


def _null_as_nan(value: object) -> object:
    """Earlier versions wrote null for a number that is not finite."""
    return math.nan if value is None else value


class StepRecord(NamedTuple):
    """What the detection of loss spikes needs of a step; the gradient norm is before clipping."""

    step: int
    loss: float
    gradient_norm: float


class CoolDown(NamedTuple):
    """The end of a run that stops early: its learning rate falls along a line.

    `first_step` and `last_step` are how many steps are done where it begins and ends;
    `learning_rate` is the schedule's where it begins.
    """

    first_step: int
    last_step: int
    learning_rate: float


class Position(ManifestSection):
    """The progress of a run, and everything needed to resume it exactly.

    It is immutable: `changed` returns a copy. A step's samples depend on its number alone, so the
    position needs no record of the data read.

    Attributes:
        step: the steps completed so far, including those that were skipped.
        tokens_seen: the tokens of these steps.
        seconds: the time spent in training steps, over all attempts.
        skipped_steps: the numbers, from 1, of the steps that must not change the weights: their
            loss or gradient was not finite, or a rollback excluded them.
        recomputed_steps: how many steps were computed twice, and were finite the second time.
        rollbacks: how often the run went back to a checkpoint because of a spike.
        learning_rate_factor: the factor by which the schedule's rate is multiplied. An observer may
            lower it.
        initial_nll_per_token: the score of each held-out corpus before the first step, from which
            forgetting is measured.
        scored_sequences: of how many sequences of each corpus that score is
            (validation.max_sequences); None before the first step, and of an earlier version.
        recent: the last steps that changed the weights, oldest first.
        lowest_nll_per_token: the lowest score of the new text so far; None before the first one.
        validations_without_gain: how many validations in a row were not below it.
        cool_down: the end of a run that stops early; None until that is decided.
    """

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    skipped_steps: tuple[int, ...] = ()
    recomputed_steps: int = 0
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    initial_nll_per_token: dict[str, Annotated[float, BeforeValidator(_null_as_nan)]] = {}
    scored_sequences: int | None = None
    recent: tuple[StepRecord, ...] = ()
    lowest_nll_per_token: float | None = None
    validations_without_gain: int = 0
    cool_down: CoolDown | None = None

    def last_step(self, config: RunConfig) -> int:
        """After how many steps the run ends: its schedule's, or the last one of its cool-down."""
        # A run whose `stop_after` was removed goes on by its schedule.
        if self.cool_down is None or config.validation.stop_after is None:
            return config.schedule.steps
        return min(self.cool_down.last_step, config.schedule.steps)

    def changed(self, **changes: object) -> Position:
        return self.model_copy(update=changes)

    def recording(self, record: StepRecord, stability: Stability) -> Position:
        """A copy with the last step in `recent`, which goes as far back as the detection of spikes
        needs."""
        length = stability.window + stability.spike_steps
        return self.changed(recent=(*self.recent, record)[-length:])

    def skipping(self, *steps: int) -> Position:
        """A copy with `steps` added to those that are skipped."""
        return self.changed(skipped_steps=tuple(sorted({*self.skipped_steps, *steps})))
