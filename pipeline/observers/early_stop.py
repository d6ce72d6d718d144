"""Early stopping: the run is finished when the held-out text of its new domain is no longer predicted better."""

from __future__ import annotations

from math import isfinite
from statistics import fmean

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.parallel.ranks import broadcast_from_rank0, warn_on_rank0
from pipeline.training.observer import Observer, ValidationEvent

_logger = log.get_logger(__name__)


class EarlyStop(Observer):
    """Ends the run after `validation.stop_after` validations in a row without a gain."""

    def __init__(self, config: RunConfig) -> None:
        self.stop_after = config.validation.stop_after
        self.corpora = [name for name, corpus in config.data.corpora.items() if corpus.role == "new"]

    def on_validation(self, event: ValidationEvent) -> None:
        losses = [event.scores[name].nll_per_token for name in self.corpora if name in event.scores]
        if self.stop_after is None or not losses:
            return
        loss = broadcast_from_rank0(lambda: fmean(losses))
        best = event.position.best_nll_per_token
        gains = isfinite(loss) and (best is None or loss < best)
        without = 0 if gains else event.position.validations_without_gain + 1
        event.position = event.position.changed(
            best_nll_per_token=loss if gains else best, validations_without_gain=without
        )
        if without >= self.stop_after:
            message = "step %d: %d validations in a row brought no gain on held-out new text; the run is finished"
            warn_on_rank0(_logger, message, event.position.step, without)
