"""The learning rate, as a pure function of the step."""

from __future__ import annotations

import math

from pipeline.config.run import Schedule


def learning_rate(step: int, schedule: Schedule) -> float:
    """The rate of the optimizer step that follows `step` steps already taken.

    It rises linearly over the first `warmup_fraction` of the steps, then falls to `final_learning_rate_fraction` of the
    peak: along a line, along half a cosine, or (wsd) along a line over the last `decay_fraction` of the steps only.
    """
    warmup_steps = math.ceil(schedule.warmup_fraction * schedule.steps)
    if step < warmup_steps:
        return schedule.learning_rate * (step + 1) / warmup_steps
    decay_steps = schedule.steps - warmup_steps
    if schedule.decay == "wsd":
        decay_steps = min(decay_steps, math.ceil(schedule.decay_fraction * schedule.steps))
    progress = max(0.0, (step - (schedule.steps - decay_steps)) / max(1, decay_steps))
    falling = (1 + math.cos(math.pi * progress)) / 2 if schedule.decay == "cosine" else 1 - progress
    final = schedule.final_learning_rate_fraction
    return schedule.learning_rate * (final + (1 - final) * falling)
