"""The forgetting budget, which may lower the learning rate of a run or end it at a validation."""

from __future__ import annotations

import math

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.config.stability import Forgetting
from pipeline.errors import ForgettingError
from pipeline.parallel.ranks import broadcast_from_rank0, warn_on_rank0
from pipeline.training.observer import Observer, ValidationEvent

_logger = log.get_logger(__name__)


# A float's exponential overflows not far above.
_MAX_NATS = math.log(1e300)


class ForgettingBudget(Observer):
    """Measures forgetting, and acts where it is beyond the budget.

    Forgetting is the relative growth of the perplexity on a replayed corpus since step 0.
    """

    def __init__(self, config: RunConfig) -> None:
        self.budget = config.forgetting
        self.has_gate = config.gate is not None
        self.corpora: list[str] = []
        for name, corpus in config.data.corpora.items():
            if corpus.role == "replay":
                self.corpora.append(name)

    def on_validation(self, event: ValidationEvent) -> None:
        for name, initial in event.position.initial_nll_per_token.items():
            if name not in event.scores or name not in self.corpora:
                continue
            nats = event.scores[name].nll_per_token - initial
            forgetting = math.inf
            if nats < _MAX_NATS:
                # exp(a) / exp(b) - 1 without the loss of digits near 0.
                forgetting = math.expm1(nats)
            event.figures[f"forgetting/{name}"] = forgetting
        apply_forgetting_budget(event, self.budget, has_gate=self.has_gate)


def apply_forgetting_budget(
    event: ValidationEvent, budget: Forgetting, *, has_gate: bool = False
) -> None:
    """Compares rank 0's figures with the budget and acts alike on all ranks.

    Every rank must call it.

    Args:
        has_gate: whether a gate is fitted after training. Messages then say that the figures are
            those of the model without it.
    """

    def first_beyond() -> str | None:
        limits = {"forgetting": budget.max_increase, "kl_from_base": budget.max_kl_from_base}
        for name, value in event.figures.items():
            figure, _, _ = name.partition("/")
            limit = limits.get(figure)
            # Written so that NaN, which is not below any number, is beyond the limit too.
            if limit is not None and not value <= limit:
                found = f"{name} {value:.4f} is beyond {limit}"
                if has_gate:
                    found += " for the model without its gate, which is fitted after training"
                return found
        return None

    # Decided once: figures are reduced over all ranks, but a rank that saw another last bit must
    # not leave the others.
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
            f"step {step}: {beyond}; this step is saved. Convert it, or raise the budget in "
            "`forgetting` and start again"
        )
