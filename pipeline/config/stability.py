"""The sections `stability` and `forgetting`: what a run does about spikes, and about forgetting."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Stability(Section):
    """The handling of bad steps, and when a run is ended as diverged (docs/stability.md)."""

    max_skipped_steps: NonNegativeInt = 20
    """steps skipped for NaN, infinity or rollbacks, beyond which the run ends as diverged"""
    # In nats above the median, not as a multiple: near a loss of 0.01 noise alone doubles it
    # (docs/adr/0011-one-job-a-run-folder.md).
    loss_increase: PositiveFloat | None = 1.0
    """nats a token above its running median at which a loss is a spike; null: never"""
    gradient_norm_factor: Annotated[float, Field(gt=1)] | None = 10.0
    """multiple of its running median at which a gradient norm above gradient_clipping is a spike;
    null: never"""
    window: Annotated[int, Field(ge=2)] = 128
    """steps of a running median, before which no step is a spike"""
    # Three in a row, because training recovers from a single bad batch.
    spike_steps: PositiveInt = 3
    """spikes in a row after which the run rolls back to the checkpoint before them, and skips
    them"""
    max_rollbacks: NonNegativeInt = 3
    """rollbacks, after which the next spikes end the run as diverged"""

    @property
    def rollback_steps(self) -> int:
        """How many steps a checkpoint must be old for a rollback to return to it.

        Spikes are recognised only after spike_steps of them: a newer checkpoint may hold some. 0 if
        the run never rolls back.
        """
        finds_spikes = self.loss_increase is not None or self.gradient_norm_factor is not None
        return self.spike_steps if finds_spikes and self.max_rollbacks > 0 else 0


class Forgetting(Section):
    """How much of the base's own domain may be forgotten; checked at each validation.

    The held-out parts of the corpora of role replay stand for that domain.
    """

    max_increase: PositiveFloat | None = None
    """largest increase of held-out perplexity since step 0: 0.05 is 5 %"""
    max_kl_from_base: PositiveFloat | None = None
    """largest KL(base || model) in nats a token, on the batch of validation.probe"""
    action: Literal["warn", "stop", "lower_learning_rate"] = "warn"
    """beyond either limit: a warning, saving and ending the run, or a lower learning rate from then
    on"""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """factor on the learning rate at each lower_learning_rate"""
