"""A line of the log for each validation: what the held-out figures were at first, and are now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.model.output import perplexity
from pipeline.run_folder.metrics import METRICS, only_numbers, readable, validation_at_start
from pipeline.training.observer import Observer, StepEvent, ValidationEvent

_MUCH_FORGOTTEN = 1.0
"""The growth of a replay corpus's perplexity from which a run without a budget warns: doubled."""
_OF_THE_CORE = ("seconds", "kl_from_base", "changed_top_tokens", "forgetting")
_logger = log.get_logger(__name__)


class HeldoutLines(Observer):
    """Logs perplexities and what extensions have measured, for rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self._others_at_start: dict[str, float] = {}
        self._has_budget = config.forgetting.max_increase is not None
        self._of = "held-out perplexity"
        if config.gate is not None:
            # The gate, which is fitted after training, closes the expansion for old text.
            self._of += " without the gate"
        start = validation_at_start(config.folder / METRICS)
        if start is not None:
            self._others_at_start = _others(only_numbers(start))

    def on_step(self, event: StepEvent) -> None:
        if event.step != 0:
            return
        self._others_at_start = _others(event.figures)
        parts: list[str] = []
        for name, value in event.figures.items():
            figure, _, corpus = name.partition("/")
            if figure == "perplexity":
                parts.append(f"{corpus} {readable(value)}")
        parts += [f"{name} {value:.3f}" for name, value in self._others_at_start.items()]
        _logger.info("before the first step: %s: %s", self._of, ", ".join(parts))

    def on_validation(self, event: ValidationEvent) -> None:
        parts = [*self._corpora(event), *self._others(event.figures)]
        line = f"step {event.position.step}: {self._of}: {', '.join(parts)}"
        forgotten = _most_forgotten(event.figures)
        if forgotten is None or self._has_budget:
            # Beyond its budget a run warns anyway.
            _logger.info("%s", line)
        else:
            advice = "forgetting.max_increase sets a limit"
            _logger.warning("%s; much of %s is forgotten: %s", line, forgotten, advice)

    def _corpora(self, event: ValidationEvent) -> Iterator[str]:
        for corpus, score in event.scores.items():
            text = f"{corpus} {readable(score.perplexity)}"
            initial = event.position.initial_nll_per_token.get(corpus)
            if initial is not None:
                text += f" (at first {readable(perplexity(initial))})"
            yield text

    def _others(self, figures: Mapping[str, float]) -> Iterator[str]:
        for name, value in _others(figures).items():
            text = f"{name} {value:.3f}"
            if name in self._others_at_start:
                text += f" (at first {self._others_at_start[name]:.3f})"
            yield text


def _others(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures that observers of extensions have added to those of a step.

    Such as the results of tasks, `<metric>/<task>`.
    """
    corpora: set[str] = set()
    for name in figures:
        figure, _, corpus = name.partition("/")
        if figure == "perplexity":
            corpora.add(corpus)
    found: dict[str, float] = {}
    for name, value in figures.items():
        figure, _, of = name.partition("/")
        if of and of not in corpora and figure not in _OF_THE_CORE:
            found[name] = value
    return found


def _most_forgotten(figures: Mapping[str, float]) -> str | None:
    """The corpus of role replay whose perplexity grew most, if it has doubled."""
    most = _MUCH_FORGOTTEN
    found: str | None = None
    for name, value in figures.items():
        figure, _, corpus = name.partition("/")
        grown = math.inf if math.isnan(value) else value
        if figure == "forgetting" and grown > most:
            most = grown
            found = corpus
    return found
