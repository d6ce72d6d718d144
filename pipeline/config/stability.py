"""The sections `stability`, `forgetting` and `watchdog`: what a run does when training, or a rank, goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Stability(Section):
    """What is done about steps that go wrong, and what a run bears before it gives up (docs/stability.md)."""

    max_skipped_steps: NonNegativeInt = 20
    """steps that change nothing, over the whole run: no number came out of them, or a rollback set them aside"""
    loss_increase: PositiveFloat | None = Field(
        default=1.0, description="a spike: so many nats a token above the running median; null: never"
    )
    gradient_norm_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=10.0, description="or so many times its running median, and clipped; null: never"
    )
    window: Annotated[int, Field(ge=2)] = 128
    """steps that the median is taken over; before there are as many, nothing is a spike"""
    spike_steps: PositiveInt = 3
    """in a row, until the run goes back to the last checkpoint before them and sets them aside"""
    max_rollbacks: NonNegativeInt = 3
    """over the whole run"""


class Forgetting(Section):
    """How much of the base's own domain, the corpora of role replay, may be lost; looked at in each validation."""

    max_increase: PositiveFloat | None = Field(
        default=None, description="of held-out perplexity over step 0's, as a fraction"
    )
    max_kl_from_base: PositiveFloat | None = Field(
        default=None, description="nats a token, on the probe batch of the diagnostics"
    )
    action: Literal["warn", "stop", "lower_learning_rate"] = "warn"
    """beyond either: say so; save and end; or multiply the learning rate, for the rest of the run"""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """each time, where the action is lower_learning_rate"""


class Watchdog(Section):
    """When a run whose ranks no longer work together ends itself, to be started again."""

    beat_every_s: PositiveFloat = 5.0
    """each rank says so often where it is"""
    dead_after_s: PositiveFloat = 60.0
    """a rank that says nothing for so long is lost; one whose process ends is missed at once"""
    hung_after_s: PositiveFloat = 600.0
    """no phase of a step (data, forward, backward, step) takes longer on every rank"""
    slow_after_s: PositiveFloat = 1800.0
    """the same for what reads and writes much: the start, a validation, a save"""
