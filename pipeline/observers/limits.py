"""What changes or ends a run at a validation: the forgetting budget, and no more gain on new text."""

from __future__ import annotations

import math
from statistics import fmean

from pipeline import log
from pipeline.config.run import Forgetting, RunConfig
from pipeline.errors import ForgettingError
from pipeline.parallel.ranks import broadcast_from_rank0, warn_on_rank0
from pipeline.training.observer import Observer, ValidationEvent

_logger = log.get_logger(__name__)


class ForgettingBudget(Observer):
    """Measures forgetting, the growth of perplexity on replayed corpora since step 0; beyond the budget, acts."""

    def __init__(self, config: RunConfig) -> None:
        self.budget = config.forgetting
        self.corpora = [name for name, corpus in config.data.corpora.items() if corpus.role == "replay"]

    def on_validation(self, event: ValidationEvent) -> None:
        for name, initial in event.position.initial_nll_per_token.items():
            if name in event.scores and name in self.corpora:
                nats = event.scores[name].nll_per_token - initial
                event.figures[f"forgetting/{name}"] = math.expm1(nats) if nats < math.log(1e300) else math.inf
        apply_forgetting_budget(event, self.budget)


def apply_forgetting_budget(event: ValidationEvent, budget: Forgetting) -> None:
    """Compares rank 0's figures with the budget and acts alike on all ranks; every rank must call it."""
    limits = {"forgetting": budget.max_increase, "kl_from_base": budget.max_kl_from_base}

    def first_beyond() -> str | None:
        for name, value in event.figures.items():
            limit = limits.get(name.partition("/")[0])
            if limit is not None and not value <= limit:  # NaN is beyond too
                return f"{name} {value:.4f} is beyond {limit}"
        return None

    beyond = broadcast_from_rank0(first_beyond)
    if beyond is None:
        return
    step = event.position.step
    if budget.action == "lower_learning_rate":
        factor = event.position.learning_rate_factor * budget.learning_rate_factor
        event.position = event.position.changed(learning_rate_factor=factor)
        beyond += f"; from now on the learning rate is the schedule's times {factor:g}"
    warn_on_rank0(_logger, "step %d: %s", step, beyond)
    if budget.action == "stop":
        event.stop = ForgettingError(
            f"step {step}: {beyond}; this step is saved. Convert it, or raise the budget in `forgetting` and start "
            "again"
        )


class EarlyStop(Observer):
    """Ends the run after `validation.stop_after` validations in a row without a gain on held-out new text."""

    def __init__(self, config: RunConfig) -> None:
        self.stop_after = config.validation.stop_after
        self.corpora = [name for name, corpus in config.data.corpora.items() if corpus.role == "new"]

    def on_validation(self, event: ValidationEvent) -> None:
        losses = [event.scores[name].nll_per_token for name in self.corpora if name in event.scores]
        if self.stop_after is None or not losses:
            return
        loss, best = broadcast_from_rank0(lambda: fmean(losses)), event.position.best_nll_per_token
        gains = math.isfinite(loss) and (best is None or loss < best)
        without = 0 if gains else event.position.validations_without_gain + 1
        event.position = event.position.changed(
            best_nll_per_token=loss if gains else best, validations_without_gain=without
        )
        if without >= self.stop_after:
            message = "step %d: %d validations in a row brought no gain on held-out new text; the run is finished"
            warn_on_rank0(_logger, message, event.position.step, without)
