"""The forgetting budget: how much of the base's own domain may be lost, and the action beyond the limit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline import log
from pipeline.checkpoint.manifest import Position
from pipeline.config.run import Forgetting, RunConfig
from pipeline.errors import ForgettingError
from pipeline.parallel.ranks import broadcast_from_rank0, warn_on_rank0
from pipeline.training.observer import Observer, ValidationEvent
from pipeline.training.validation import HeldoutScore

_logger = log.get_logger(__name__)


class ForgettingBudget(Observer):
    """Measures forgetting at every validation; beyond the budget, warns, lowers the learning rate or ends the run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def on_validation(self, event: ValidationEvent) -> None:
        event.figures.update(forgetting_figures(event.scores, event.position, self.config))
        apply_forgetting_budget(event, self.config.forgetting)


def forgetting_figures(scores: Mapping[str, HeldoutScore], position: Position, config: RunConfig) -> dict[str, float]:
    """The relative growth of the perplexity of each corpus of role replay since step 0."""
    return {
        f"forgetting/{name}": _growth(scores[name].nll_per_token - initial)
        for name, initial in position.initial_nll_per_token.items()
        if name in scores and config.data.corpora[name].role == "replay"
    }


def apply_forgetting_budget(event: ValidationEvent, budget: Forgetting) -> None:
    """Compares rank 0's figures with the budget and acts alike on all ranks; every rank must call it."""
    limits = {"forgetting/": budget.max_increase, "kl_from_base/": budget.max_kl_from_base}
    beyond = broadcast_from_rank0(
        lambda: next(
            (
                f"{name} {value:.4f} is beyond {limit}"
                for name, value in event.figures.items()
                for prefix, limit in limits.items()
                if name.startswith(prefix) and limit is not None and not value <= limit
            ),
            None,
        )
    )
    if beyond is None:
        return
    position = event.position
    if budget.action == "lower_learning_rate":
        position = position.changed(learning_rate_factor=position.learning_rate_factor * budget.learning_rate_factor)
        beyond += f"; from now on the learning rate is the schedule's times {position.learning_rate_factor:g}"
        event.position = position
    warn_on_rank0(_logger, "step %d: %s", position.step, beyond)
    if budget.action == "stop":
        event.stop = ForgettingError(
            f"step {position.step}: {beyond}; this step is saved. Convert it, or raise the budget in `forgetting` "
            "and start again"
        )


def _growth(nats: float) -> float:
    """exp(nats) - 1, infinite instead of an overflow."""
    return math.expm1(nats) if nats < math.log(1e300) else math.inf
