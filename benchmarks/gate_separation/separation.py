"""Gates fitted on a pair of texts, and how well they tell the two apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from torch import Tensor

from benchmarks.gate_separation.texts import Kind, self_generated, windows_of
from benchmarks.results import Row
from pipeline import log
from pipeline.config.gate import GateFeatures
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError
from pipeline.extensions.gate.fit import area_under_roc
from pipeline.extensions.gate.fitting import BaseStream, fit_on
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.threshold import threshold_by_open_fraction
from pipeline.extensions.gate.windows import Windows, joined
from pipeline.gating.gate import FittedGate
from pipeline.model.decoder import Decoder

OWN_TEXT = "own text"
"""What the base writes, as the text that a gate is fitted against."""
_EVEN_ODDS = 0.0
"""The score at which a token is as likely new as not: scores are log odds."""
logger = log.get_logger(__name__)


class Separation:
    """Gates of a base's stream, fitted on pairs of texts."""

    def __init__(self, decoder: Decoder, options: argparse.Namespace) -> None:
        self._decoder = decoder
        self._length = options.sequence_length
        self._tokens = options.tokens
        self._tokenizer = load_tokenizer(options.base)
        self._max_open_fraction: float = options.max_open_fraction
        self._own_text: FittingText | None = None
        if options.own_text:
            # Written once: it is what all gates are fitted against.
            self._own_text = self_generated(
                options.base,
                self._tokenizer,
                tokens=options.own_text,
                length=options.sequence_length,
                seed=options.seed,
            )

    def rows(
        self, pair: Sequence[str], kinds: Mapping[str, Kind], layers: Sequence[int]
    ) -> Iterator[Row]:
        """What gates do to text of the pair (new, old) that they were not fitted on.

        A row has the gate's AUC, and the shares of open tokens. Against the base's own text there
        are gates with the default features alone.
        """
        new, old = pair
        test = joined(
            [
                self._windows(kinds[new].test, is_new=True),
                self._windows(kinds[old].test, is_new=False),
            ]
        )
        # The same test text for all gates, whatever they were fitted against: rows compare.
        for against, text in self._fitting_texts(kinds[new], kinds[old], old).items():
            all_features: Sequence[GateFeatures] = ["token+running_mean"]
            if against == old:
                all_features = get_args(GateFeatures)
            for layer in layers:
                stream = BaseStream(self._decoder, layer)
                for features in all_features:
                    gate = self._fit(stream, text, features)
                    if gate is None:
                        continue
                    row: Row = {"new": new, "old": old, "fitted_against": against}
                    row["layer"] = layer
                    row["features"] = features
                    row |= _figures(stream.scores(test, gate), test, gate.threshold)
                    yield row

    def _fitting_texts(self, new: Kind, old: Kind, old_name: str) -> dict[str, FittingText]:
        """What gates are fitted on, by the name of what the new text is told from."""
        fit = self._windows(new.fit, is_new=True)
        unused = self._windows(new.unused, is_new=True)
        old_fit = self._windows(old.fit, is_new=False)
        old_unused = self._windows(old.unused, is_new=False)
        texts = {old_name: FittingText(joined([old_fit, fit]), joined([old_unused, unused]))}
        if self._own_text is not None:
            texts[OWN_TEXT] = FittingText(
                joined([self._own_text.fit, fit]), joined([self._own_text.unused, unused])
            )
        return texts

    def _fit(
        self, stream: BaseStream, text: FittingText, features: GateFeatures
    ) -> FittedGate | None:
        """The gate; None if most of what the base writes looks like the new text."""
        try:
            fit = fit_on(stream, text, features)
        except DataError as error:
            # Of the user's own texts it is a mistake. What a base writes may look like the new text
            # where it was trained on such text: that is a finding.
            if not text.fit.is_self_generated.any():
                raise
            logger.warning("before layer %d: left out: %s", stream.layer, error)
            return None
        threshold = threshold_by_open_fraction(fit.negatives, self._max_open_fraction)
        return replace(fit.gate, threshold=threshold)

    def _windows(self, texts: Iterable[str], *, is_new: bool) -> Windows:
        return windows_of(texts, self._tokenizer, self._length, self._tokens, is_new=is_new)


def _figures(scores: Tensor, test: Windows, threshold: float) -> dict[str, float]:
    """The AUC of scores [N, S], and the shares of tokens that are open.

    The threshold is set by the old text alone. Even odds show what the scores would give without
    it: a gate whose threshold is far above them closes much new text that it does recognise.
    """
    # Padding, and what precedes documents, is left out.
    is_new = test.is_new[test.present]
    present = scores[test.present]
    new = present[is_new]
    old = present[~is_new]
    return {
        "auc": area_under_roc(new, old),
        "new_open": _share_above(new, threshold),
        "old_open": _share_above(old, threshold),
        "new_open_at_even_odds": _share_above(new, _EVEN_ODDS),
        "old_open_at_even_odds": _share_above(old, _EVEN_ODDS),
    }


def _share_above(scores: Tensor, threshold: float) -> float:
    return float((scores > threshold).double().mean())
