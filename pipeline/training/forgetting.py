"""How much of the base's own domain is lost, and what a run does beyond its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from pipeline import log
from pipeline.checkpoint.position import Position
from pipeline.config.run import RunConfig
from pipeline.config.stability import Forgetting
from pipeline.errors import ForgettingError
from pipeline.training.unison import in_unison, warn_in_unison
from pipeline.training.validation import HeldoutScore

_logger = log.get_logger(__name__)


class Verdict(NamedTuple):
    """What follows from a validation: where the run stands now, and why it must end, if it must."""

    position: Position
    reason_to_stop: str | None


def forgetting_figures(scores: Mapping[str, HeldoutScore], position: Position, config: RunConfig) -> dict[str, float]:
    """By how much each corpus's perplexity has grown since step 0, as a fraction; of role replay: forgetting."""
    growth = {
        name: _growth(scores[name].nll_per_token - initial)
        for name, initial in position.initial_nll_per_token.items()
        if name in scores
    }
    replayed = [name for name in growth if config.data.corpora[name].role == "replay"]
    return {f"perplexity_growth/{name}": growth[name] for name in growth} | {
        f"forgetting/{name}": growth[name] for name in replayed
    }


def heed_budget(figures: Mapping[str, float], position: Position, budget: Forgetting) -> Verdict:
    """Holds a validation's figures against the budget; every rank must call it, with the same figures."""
    limits = {"forgetting/": budget.max_increase, "kl_from_base/": budget.max_kl_from_base}
    beyond = [
        f"{name} {value:.4f} is beyond {limit}"
        for name, value in figures.items()
        for prefix, limit in limits.items()
        if name.startswith(prefix) and limit is not None and not value <= limit
    ]
    if not beyond:
        return Verdict(position, None)
    if budget.action == "lower_learning_rate":
        position = position.changed(learning_rate_factor=position.learning_rate_factor * budget.learning_rate_factor)
        beyond[0] += f"; from here on the learning rate is the schedule's times {position.learning_rate_factor:g}"
    warn_in_unison(_logger, "step %d: %s", position.step, beyond[0])
    return Verdict(position, beyond[0] if budget.action == "stop" else None)


def end_forgetful(position: Position, reason: str) -> None:
    """Raises ForgettingError on the first rank; the others leave without a word."""

    def stop() -> None:
        raise ForgettingError(
            f"step {position.step}: {reason}; this step is saved. Convert it, or raise the budget in `forgetting` and "
            "start again"
        )

    in_unison(stop)


def _growth(nats: float) -> float:
    return math.expm1(nats) if nats < math.log(1e300) else math.inf
