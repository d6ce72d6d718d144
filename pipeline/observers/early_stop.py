"""The early stop: when a run ends because the new text gains no more.

How it then cools down is `pipeline.training.learning_rate.cooled_rate`. All decisions follow from
the run's position, so a resumed run makes the same ones as a run that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from pipeline import log
from pipeline.checkpoint.position import CoolDown, Position
from pipeline.config.run import RunConfig
from pipeline.parallel.ranks import broadcast_from_rank0, warn_on_rank0
from pipeline.training.learning_rate import learning_rate
from pipeline.training.observer import Observer, ValidationEvent

_logger = log.get_logger(__name__)


class EarlyStop(Observer):
    """Counts the validations without a gain on the new text, and decides when the run ends."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.corpora: list[str] = []
        for name, corpus in config.data.corpora.items():
            if corpus.role == "new":
                self.corpora.append(name)

    def on_validation(self, event: ValidationEvent) -> None:
        if self.config.validation.stop_after is None:
            return
        before = event.position
        scores: list[float] = []
        initial: list[float] = []
        for name in self.corpora:
            if name in event.scores:
                scores.append(event.scores[name].nll_per_token)
                initial.append(before.initial_nll_per_token.get(name, math.inf))
        if before.lowest_nll_per_token is None and initial:
            # The score before the first step is the first that is to be lowered.
            before = before.changed(lowest_nll_per_token=fmean(initial))
        # Decided once: a rank that saw another last bit must not leave the others.
        position = broadcast_from_rank0(partial(after_validation, before, scores, self.config))
        event.position = position
        event.figures["validations_without_gain"] = position.validations_without_gain
        if position.cool_down is not None and before.cool_down is None:
            warn_on_rank0(
                _logger,
                "step %d: %d validations in a row did not lower nll_per_token of the new text "
                "below %.4f; the run cools down and ends after step %d",
                position.step,
                position.validations_without_gain,
                position.lowest_nll_per_token,
                position.last_step(self.config),
            )


def after_validation(position: Position, scores: Sequence[float], config: RunConfig) -> Position:
    """The position after a validation of the new text; the run's end may be decided.

    Args:
        position: of the step that was validated.
        scores: nll_per_token of each new corpus; their mean is compared.
        config: the run, which sets `validation.stop_after`.
    """
    settings = config.validation
    assert settings.stop_after is not None, "its caller stops early"
    found = fmean(scores)
    lowest = position.lowest_nll_per_token
    # Written so that NaN is no gain.
    if lowest is None or found < lowest:
        return position.changed(lowest_nll_per_token=found, validations_without_gain=0)
    count = position.validations_without_gain + 1
    position = position.changed(validations_without_gain=count)
    if count < settings.stop_after or position.cool_down is not None:
        return position
    step = position.step
    last = min(step + settings.cool_down_steps, config.schedule.steps)
    return position.changed(cool_down=CoolDown(step, last, learning_rate(step, config.schedule)))
