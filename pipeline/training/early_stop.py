"""The early stop: when a run ends because the new text gains no more, and how it cools down.

All decisions follow from the run's position, so a resumed run makes the same ones as a run that
never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pipeline.checkpoint.position import CoolDown, Position
from pipeline.config.run import RunConfig
from pipeline.config.schedule import learning_rate


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


def cooled_rate(rate: float, position: Position, config: RunConfig) -> float:
    """The learning rate of the step after `position`: the schedule's `rate`, or less in a
    cool-down.

    There it falls along a line, from the rate at which the cool-down began to the schedule's final
    one, as it would at the end of the schedule. It is never above the schedule's.
    """
    cool_down = position.cool_down
    if cool_down is None or config.validation.stop_after is None:
        return rate
    steps = max(1, cool_down.last_step - cool_down.first_step)
    progress = min(1.0, (position.step - cool_down.first_step) / steps)
    schedule = config.schedule
    final = schedule.final_learning_rate_fraction * schedule.learning_rate
    return min(rate, final + (cool_down.learning_rate - final) * (1 - progress))
