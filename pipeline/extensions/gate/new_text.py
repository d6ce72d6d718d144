"""What closing costs on new text, and the threshold that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.errors import DataError
from pipeline.extensions.gate.effect import measure, reference_nll
from pipeline.extensions.gate.fitting import BaseStream, Fit
from pipeline.extensions.gate.threshold import (
    Closing,
    threshold_by_cost,
    threshold_by_open_fraction,
)
from pipeline.extensions.gate.windows import Windows
from pipeline.gating.folder import FIRST_TOKENS, HeldoutText, ThresholdFigures
from pipeline.gating.gate import FittedGate
from pipeline.model.causal_decoder import CausalDecoder

IMPOSSIBLE_NATS = 10.0
"""What closing costs before a new token of an extended vocabulary, which a closed token cannot
predict: the base's own tokens for it take about as much. No perplexity can count it.
"""
_ATTEMPTS = 4
"""How many thresholds are tried where the gated model costs more than the tokens alone."""


class Models(NamedTuple):
    """The models that a gate joins.

    Attributes:
        trained: the trained model, without a gate.
        base: the base. It is `trained` itself, except after full fine-tuning.
    """

    trained: CausalDecoder
    base: CausalDecoder


class NewText(NamedTuple):
    """Held-out new text, scored once.

    Attributes:
        windows: of each corpus, by its name.
        nll: their `reference_nll`.
        closing: what it costs to close their tokens behind the first ones.
        start_score: the score of the token with which every document starts; -inf: there is none.
    """

    windows: Mapping[str, Windows]
    nll: Mapping[str, Tensor]
    closing: Closing
    start_score: float

    def threshold(self, max_cost: float, settings: GateSettings) -> float:
        """The threshold at which closing tokens costs `max_cost`, by their own losses alone."""
        return threshold_by_cost(
            self.closing, max_cost, settings.max_closed_fraction, self.start_score
        )


def score_new_text(
    models: Models,
    stream: BaseStream,
    gate: FittedGate,
    windows: Mapping[str, Windows],
    config: RunConfig,
    start_score: float,
) -> NewText:
    """New text by the base, by the trained model, and by the gate.

    Raises:
        DataError: nothing is predicted behind the first tokens.
    """
    nll: dict[str, Tensor] = {}
    scores: list[Tensor] = []
    nats: list[Tensor] = []
    always_open: list[Tensor] = []
    base_tokens = models.trained.output.base_columns
    for name, text in windows.items():
        nll[name] = reference_nll(models.trained, models.base, text, config)
        base_nll, ungated_nll = nll[name]
        lost = base_nll - ungated_nll
        lost[text.targets >= base_tokens] = IMPOSSIBLE_NATS
        # New tokens of an extended vocabulary are open, as are the gate's ids.
        is_always_open = (text.tokens >= base_tokens) | gate.opens_id(text.tokens)
        is_later = (text.targets != IGNORED) & text.present & (text.positions >= FIRST_TOKENS)
        scores.append(stream.scores(text, gate)[is_later])
        nats.append(lost[is_later])
        always_open.append(is_always_open[is_later])
    closing = Closing(torch.cat(scores), torch.cat(nats), torch.cat(always_open))
    if not len(closing.scores):
        raise DataError(
            f"gate: the held-out new text predicts nothing behind the first {FIRST_TOKENS} tokens "
            "of its documents; give longer texts, or set gate.threshold_rule: max_open_fraction"
        )
    return NewText(windows, nll, closing, start_score)


class Thresholds(NamedTuple):
    """The gate with its threshold, and what it would be by either rule.

    Attributes:
        gate: with the threshold that `gate.threshold_rule` chose.
        figures: of each rule, by its name. max_open_fraction is missing where there is too little
            other text to measure that share.
        texts: the effect of the gate on new text, where it was measured for max_cost.
        difference: the second result of `measure` for these.
    """

    gate: FittedGate
    figures: dict[str, ThresholdFigures]
    texts: dict[str, HeldoutText]
    difference: float | None


def choose_threshold(
    models: Models,
    gate: FittedGate,
    fit: Fit,
    new: NewText,
    settings: GateSettings,
    config: RunConfig,
) -> Thresholds:
    """Sets the threshold of `gate`, which has its open ids.

    Raises:
        DataError: it is set by max_open_fraction, and there is too little other text for it.
    """
    figures: dict[str, ThresholdFigures] = {}
    is_measurable = settings.max_open_fraction * len(fit.negatives) >= 1
    if is_measurable or settings.threshold_rule == "max_open_fraction":
        threshold = threshold_by_open_fraction(fit.negatives, settings.max_open_fraction)
        figures["max_open_fraction"] = _figures(
            replace(gate, threshold=threshold), fit, new.closing
        )
    by_cost = _ByCost(new.threshold(settings.max_cost, settings), {}, None)
    if settings.threshold_rule == "max_cost":
        by_cost = _lowered(by_cost.threshold, models, gate, new, settings, config)
    figures["max_cost"] = _figures(replace(gate, threshold=by_cost.threshold), fit, new.closing)
    chosen = figures[settings.threshold_rule].threshold
    return Thresholds(replace(gate, threshold=chosen), figures, by_cost.texts, by_cost.difference)


class _ByCost(NamedTuple):
    """A threshold by cost, and the fields of `Thresholds` of the same names."""

    threshold: float
    texts: dict[str, HeldoutText]
    difference: float | None


def _lowered(
    threshold: float,
    models: Models,
    gate: FittedGate,
    new: NewText,
    settings: GateSettings,
    config: RunConfig,
) -> _ByCost:
    """The highest of a few thresholds up to `threshold` at which the gated model costs at most
    gate.max_cost; the lowest of them if it costs more at all.

    Closing a token costs more than its own loss: later open tokens attend to it. So the gated model
    runs, and the threshold is lowered if it costs too much. A first guess may lower it too far: it
    is raised again, half of the way in what the tokens alone cost.
    """
    cheap: _ByCost | None = None
    # What the tokens alone cost at the highest threshold that is cheap, and at the lowest that is
    # not.
    low = 0.0
    high = math.inf
    for _ in range(_ATTEMPTS):
        gated = replace(gate, threshold=threshold)
        texts, difference = measure(*models, gated, new.windows, config, new.nll)
        tried = _ByCost(threshold, texts, difference)
        cost = cost_of_later_tokens(texts)
        budget = max(0.0, new.closing.cost(threshold))
        if cost <= settings.max_cost:
            cheap, low = tried, budget
        else:
            high = budget
        if math.isinf(high):
            break
        budget = (low + high) / 2 if cheap else high * settings.max_cost / cost
        threshold = new.threshold(budget, settings)
        if threshold == tried.threshold or (cheap and threshold == cheap.threshold):
            break
    return cheap or tried


def cost_of_later_tokens(texts: Mapping[str, HeldoutText]) -> float:
    """By what share a gate raises the perplexity of new text behind the first tokens."""
    nats = 0.0
    tokens = 0
    for text in texts.values():
        if text.role == "new" and text.cost_of_later_tokens is not None:
            nats += text.cost_of_later_tokens * text.tokens
            tokens += text.tokens
    return math.expm1(nats / max(1, tokens))


def _figures(gate: FittedGate, fit: Fit, closing: Closing) -> ThresholdFigures:
    """What a gate does to text that it was not fitted on, by its tokens alone."""
    is_open = fit.is_open(gate)
    return ThresholdFigures(
        threshold=gate.threshold,
        cost=closing.cost(gate.threshold),
        closed_fraction_of_new=1 - float(is_open[fit.is_new].double().mean()),
        open_fraction_of_negatives=float(is_open[fit.is_negative].double().mean()),
    )
