"""The section `schedule` of a run configuration: steps, batch and learning rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.reading import Decay, Fraction, PositiveFloat, PositiveInt, Section


class Schedule(Section):
    """Steps, batch and learning rate. A batch counts sequences."""

    steps: PositiveInt
    """optimizer steps"""
    global_batch_size: PositiveInt
    """sequences per step"""
    micro_batch_size: PositiveInt
    """sequences that a rank processes at a time; times the data-parallel size it divides global_batch_size"""
    learning_rate: PositiveFloat
    """the peak"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices within layers, adamw for everything else, both at learning_rate (docs/methods.md)"""
    decay: Literal["linear", "cosine", "wsd"] = "linear"
    """after the warm-up"""
    warmup_fraction: Fraction = 0.06
    """share of the steps"""
    decay_fraction: Fraction = 0.1
    """share of the steps that wsd spends decaying"""
    final_learning_rate_fraction: Fraction = 0.0
    """share of the peak that is left at the end"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """of matrices; vectors do not decay"""
    learning_rate_factors: dict[str, PositiveFloat] = {}
    """Factors of learning_rate, by kind of block (`expansion_to_base: 0.5`) or pattern of parameter names (docs/methods.md)."""
    weight_decay_factors: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Factors of weight_decay, by kind of block or pattern of parameter names."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """of AdamW"""
    gradient_clipping: PositiveFloat = 1.0
    """the largest global norm"""


def learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of the optimizer step after `step` steps.

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
