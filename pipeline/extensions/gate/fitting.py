"""Fits a gate on windows of text: which text counts as new, and which is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.gate import GateFeatures
from pipeline.errors import DataError
from pipeline.extensions.gate.fit import fit_logistic, standardisation
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.windows import Windows
from pipeline.gating.gate import FittedGate, gate_features
from pipeline.log import progress_bar
from pipeline.model.causal_decoder import CausalDecoder

MOST_LEFT_OUT = 0.5
"""The largest share of self-generated text that may look like the new text."""
NEW_KIND = 0.5
"""A kind of text of which a first fit opens a larger share of the tokens is the new text's own."""


class BaseStream:
    """The base's stream before layer `layer` of a decoder.

    No trained weights may change it there: the decoder is the base itself, or a model whose trained
    weights begin further up or are left out of the base's path.
    """

    def __init__(self, decoder: CausalDecoder, layer: int) -> None:
        self.device = decoder.device
        self.layer = layer
        self.decoder = decoder

    def features(self, windows: Windows, kind: GateFeatures) -> tuple[Tensor, Tensor]:
        """The features of the T tokens that are present, in order.

        Returns:
            features: [T, F], in fp32 on the CPU.
            is_new: bool [T].
        """
        found: list[Tensor] = []
        for group, stream in self._streams(windows, "reading the base's states"):
            features = gate_features(stream, kind, group.document_ids.to(self.device))
            found.append(features[group.present.to(self.device)].cpu())
        return torch.cat(found), windows.is_new[windows.present]

    def scores(self, windows: Windows, gate: FittedGate) -> Tensor:
        """The gate's scores: [N, S], on the CPU."""
        found: list[Tensor] = []
        for group, stream in self._streams(windows, "testing the gate"):
            found.append(gate.scores(stream, group.document_ids.to(self.device)).cpu())
        return torch.cat(found)

    def _streams(self, windows: Windows, what: str) -> Iterator[tuple[Windows, Tensor]]:
        """Groups of windows, each with its stream: [N, S, D]."""
        with progress_bar(what, windows.tokens.numel(), " tokens") as bar:
            for group in windows.groups():
                stream = self.decoder.base_stream(
                    group.tokens.to(self.device),
                    group.positions.to(self.device),
                    group.documents(self.device),
                    layer=self.layer,
                )
                yield group, stream
                bar.update(group.tokens.numel())


class Fit(NamedTuple):
    """A fitted gate without its threshold, and how it scores text that it was not fitted on.

    Attributes:
        gate: its threshold is that of even odds, 0.
        unused: windows that it was not fitted on, without what is left out.
        scores: [N, S], those of `unused`.
        left_out: the share of the self-generated text whose documents look like the new text. It
            counts neither as new nor as other text.
        left_out_kinds: the numbers of the kinds of text that look like the new text. They are left
            out too.
        self_generated_ids: [Q], the ids of all self-generated tokens that were read, without tokens
            that look new.
        given_ids: [R], the ids of all other negatives that were read, without what is left out.
    """

    gate: FittedGate
    unused: Windows
    scores: Tensor
    left_out: float
    left_out_kinds: tuple[int, ...]
    self_generated_ids: Tensor
    given_ids: Tensor

    def is_open(self, gate: FittedGate) -> Tensor:
        """The unused tokens that `gate` opens, by its threshold or their ids: bool [N, S]."""
        return (self.scores > gate.threshold) | gate.opens_id(self.unused.tokens)

    def start_score(self, start: int) -> float:
        """The score of the token `start` where a document starts with it; -inf: none does.

        It is the same in all texts.
        """
        unused = self.unused
        is_start = unused.present & (unused.positions == 0) & (unused.tokens == start)
        return max(self.scores[is_start].tolist(), default=-math.inf)

    @property
    def is_new(self) -> Tensor:
        """The tokens of new text: bool [N, S]."""
        return self.unused.present & self.unused.is_new

    @property
    def is_negative(self) -> Tensor:
        """The tokens of other text: bool [N, S]."""
        return self.unused.present & ~self.unused.is_new

    @property
    def new(self) -> Tensor:
        """[P], the scores of unused tokens of new text."""
        return self.scores[self.is_new]

    @property
    def negatives(self) -> Tensor:
        """[M], the scores of unused tokens of other text."""
        return self.scores[self.is_negative]


def fit_on(stream: BaseStream, text: FittingText, features: GateFeatures) -> Fit:
    """A gate that reads `features` of `stream`, fitted on `text.fit` and tried on `text.unused`.

    It is fitted twice. A base that knows a little of the new language may write in it, and the
    kinds of text that come with this package include the new language. So a first fit finds
    self-generated documents, and kinds, that look like the new text, and the second leaves them
    out.

    Raises:
        DataError: the text is too little, or most of the self-generated text looks like the new
            text.
    """
    values, is_new = stream.features(text.fit, features)
    mean, std = standardisation(values)
    # In place: the features are the largest tensor here.
    values = values.sub_(mean).div_(std).to(stream.device)
    weight, bias = fit_logistic(values, is_new.to(stream.device))

    looks_new = torch.zeros_like(text.fit.present)
    looks_new[text.fit.present] = (values @ weight.to(values) + bias > 0).cpu()
    left_out_kinds = kinds_that_look_new(text.fit, looks_new)
    fit = text.fit.without_new_kind(looks_new).without_kinds(left_out_kinds)
    # Of the rows of `values`, which are the tokens that were present before.
    kept = fit.present[text.fit.present]
    if not kept.all():
        weight, bias = fit_logistic(values[kept.to(stream.device)], is_new[kept].to(stream.device))
    del values
    gate = FittedGate(stream.layer, features, mean, std, weight, bias, threshold=0.0)

    scores = stream.scores(text.unused, gate)
    unused = text.unused.without_new_kind(scores > 0).without_kinds(left_out_kinds)
    return Fit(
        gate=gate,
        unused=unused,
        scores=scores,
        left_out=_left_out(text.unused, unused),
        left_out_kinds=left_out_kinds,
        self_generated_ids=torch.cat(
            [fit.self_generated_ids(looks_new), unused.self_generated_ids(scores > 0)]
        ),
        given_ids=torch.cat([fit.given_negative_ids(), unused.given_negative_ids()]),
    )


def kinds_that_look_new(windows: Windows, looks_new: Tensor) -> tuple[int, ...]:
    """The numbers of the kinds of which more than NEW_KIND of the tokens look new.

    looks_new: bool [N, S].
    """
    found: list[int] = []
    for kind, share in open_shares(windows, looks_new).items():
        if share > NEW_KIND:
            found.append(kind)
    return tuple(found)


def open_shares(windows: Windows, is_open: Tensor) -> dict[int, float]:
    """The share of the tokens of each kind that are open, by the kind's number; is_open: [N, S]."""
    kinds = windows.kinds[windows.present]
    # One more, as NO_KIND is -1.
    tokens = torch.bincount(kinds + 1)
    opened = torch.bincount(kinds + 1, weights=is_open[windows.present].double())
    shares: dict[int, float] = {}
    for place in range(1, len(tokens)):
        if tokens[place]:
            shares[place - 1] = float(opened[place] / tokens[place])
    return shares


def _left_out(before: Windows, after: Windows) -> float:
    """The share of the self-generated text that was left out.

    Raises:
        DataError: it is more than MOST_LEFT_OUT.
    """
    present = int((before.present & before.is_self_generated).sum())
    kept = int((after.present & after.is_self_generated).sum())
    if present == 0:
        return 0.0
    left_out = 1 - kept / present
    if left_out > MOST_LEFT_OUT:
        raise DataError(
            f"gate: {left_out:.0%} of the self-generated text looks like the new text, expected at "
            f"most {MOST_LEFT_OUT:.0%}; name corpora of role replay as gate.negatives, or "
            "remove the section gate"
        )
    return left_out
