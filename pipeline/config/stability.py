"""The sections `stability` and `forgetting`: when a run acts on its figures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Stability(Section):
    """The handling of bad steps, and when a run is ended as diverged (docs/stability.md)."""

    max_skipped_steps: NonNegativeInt = 20
    """most skipped steps of the whole run, those with NaN or infinity and those after a rollback
    together; beyond it the run ends as diverged"""
    # In nats above the median, not as a multiple: near a loss of 0.01 noise alone doubles it
    # (docs/adr/0011-one-job-a-run-folder.md).
    loss_increase: PositiveFloat | None = 1.0
    """how many nats per token above its running median the loss of a spike lies; null: the loss
    never makes a spike"""
    gradient_norm_factor: Annotated[float, Field(gt=1)] | None = 10.0
    """how many times its running median the gradient norm of a spike is, if it is also clipped;
    null: the gradient norm never makes a spike"""
    window: Annotated[int, Field(ge=2)] = 128
    """number of steps of the running medians; earlier in a run no step counts as a spike"""
    # Three in a row, because training recovers from a single bad batch.
    spike_steps: PositiveInt = 3
    """number of spikes in a row after which the run rolls back to the last checkpoint before them,
    and skips them"""
    max_rollbacks: NonNegativeInt = 3
    """most rollbacks of the whole run; the next spike ends it as diverged"""

    @property
    def rollback_steps(self) -> int:
        """How many steps before the newest checkpoint the one for a rollback must lie, at least."""
        finds_spikes = self.loss_increase is not None or self.gradient_norm_factor is not None
        return self.spike_steps if finds_spikes and self.max_rollbacks > 0 else 0


class Forgetting(Section):
    """How much of the base's own domain may be forgotten; checked at each validation.

    The held-out parts of the corpora of role replay stand for that domain.
    """

    max_increase: PositiveFloat | None = None
    """largest growth of the held-out perplexity since step 0, as a fraction; default: no limit"""
    max_kl_from_base: PositiveFloat | None = None
    """largest KL(base || model) in nats per token, on the first held-out batch of validation.probe,
    or of role replay; default: no limit"""
    action: Literal["warn", "stop", "lower_learning_rate"] = "warn"
    """what happens beyond either limit: a warning in the log (warn), saving and ending the run
    (stop), or a lower learning rate for the rest of the run (lower_learning_rate)"""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """factor by which action lower_learning_rate multiplies the learning rate each time"""
