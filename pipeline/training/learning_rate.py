"""The learning rate of a step: the schedule's, or a cool-down's; groups have factors of it."""

from __future__ import annotations

import math

from pipeline.checkpoint.position import Position
from pipeline.config.run import RunConfig
from pipeline.config.schedule import Schedule


def learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of the optimizer step after `step` steps.

    It rises linearly over the first `warmup_fraction` of the steps, then falls to
    `final_learning_rate_fraction` of the peak: along a line, along half a cosine, or (wsd) along a
    line over the last `decay_fraction` of the steps only.
    """
    warmup_steps = _steps_of(schedule.warmup_fraction, schedule)
    if step < warmup_steps:
        # step + 1: at a rate of 0 the first step would train nothing.
        return schedule.learning_rate * (step + 1) / warmup_steps
    # Computed from the step alone, without a state: a resumed run, or one that rolled back, has the
    # same rates.
    decay_steps = schedule.steps - warmup_steps
    if schedule.decay == "wsd":
        # Warmup-stable-decay (Hu et al. 2024, MiniCPM): the rate stays at its peak until the decay,
        # so that one run can be ended at several lengths.
        decay_steps = min(decay_steps, _steps_of(schedule.decay_fraction, schedule))
    # From 0 at the start of the decay to 1 at the end of the run.
    progress = max(0.0, (step - (schedule.steps - decay_steps)) / max(1, decay_steps))
    if schedule.decay == "cosine":
        remaining = (1 + math.cos(math.pi * progress)) / 2
    else:
        remaining = 1 - progress
    final = schedule.final_learning_rate_fraction
    return schedule.learning_rate * (final + (1 - final) * remaining)


def _steps_of(fraction: float, schedule: Schedule) -> int:
    """How many whole steps are at least `fraction` of all."""
    # 0.07 * 100 is 7.000000000000001, and 7 steps.
    return math.ceil(round(fraction * schedule.steps, 9))


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
