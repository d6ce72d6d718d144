"""The threshold of a gate: by what closing new text costs, or by how much other text opens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import DataError

_EQUAL = 1e-3
"""Scores that differ by less may be those of one state, computed in another order."""


class Closing(NamedTuple):
    """What it costs to close tokens of new text.

    Attributes:
        scores: [T], the gate's scores of the tokens.
        nats: [T] in fp64, by how much closing a token raises its loss.
        is_always_open: bool [T], the tokens that are open whatever their score.
    """

    scores: Tensor
    nats: Tensor
    is_always_open: Tensor

    def cost(self, threshold: float) -> float:
        """By what share a gate with that threshold raises the perplexity: 0.02 is 2 % more."""
        closed = (self.scores <= threshold) & ~self.is_always_open
        return math.expm1(float(self.nats[closed].sum()) / max(1, len(self.scores)))


def threshold_by_cost(
    closing: Closing, max_cost: float, max_closed_fraction: float, start_score: float = -math.inf
) -> float:
    """The highest threshold that closes at most a share of new text, at a bounded cost.

    It is in the middle between two neighbouring scores that differ by more than rounding. Where
    every threshold above `start_score` costs more, it is the lowest of these: with an open start no
    text at all would be the base's.

    Args:
        closing: of at least one token.
        max_cost: by what share the closed tokens may raise the perplexity.
        max_closed_fraction: the largest share of tokens that may be closed.
        start_score: the score of the token with which every document starts.
    """
    order = closing.scores.argsort()
    # In fp64: the middle of two neighbouring fp32 numbers may round to one of them.
    scores = closing.scores[order].double()
    is_closed = ~closing.is_always_open[order]
    # Place k is the threshold with k scores below it.
    below = torch.cat([scores[:1] - 1, scores]).clamp(min=start_score)
    above = torch.cat([scores, below[-1:] + 1])
    closed = _sums(is_closed.double())
    nats = _sums(closing.nats[order] * is_closed)
    is_cheap = nats <= math.log1p(max_cost) * len(scores)
    are_few = closed <= max_closed_fraction * len(scores)
    is_wide = above - below >= _EQUAL
    allowed = (is_cheap & are_few & is_wide).nonzero()
    # Below the lowest score nothing is closed, which costs nothing: without a start there is one.
    place = int(allowed.max() if len(allowed) else is_wide.nonzero().min())
    return float((above[place] + below[place]) / 2)


def _sums(values: Tensor) -> Tensor:
    """The sums of the first 0, 1, ..., T of values [T]."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def threshold_by_open_fraction(scores: Tensor, max_open_fraction: float) -> float:
    """A threshold of the log odds, above which at most `max_open_fraction` of the scores lie.

    It is above 0 (even odds), and in the middle of the widest gap between two neighbouring
    scores above which at least half of that fraction lies. Tokens with equal states, such as the
    first of every document, have equal scores: with a threshold at one of these scores, rounding
    would decide whether they open. If the widest gap is as narrow as rounding, the next wider gap
    above it is taken.

    Args:
        scores: [N], the scores of tokens that are not new.
        max_open_fraction: the largest share of them above the threshold.

    Raises:
        DataError: the scores are too few to measure that share.
    """
    allowed = int(max_open_fraction * len(scores))
    if allowed < 1:
        raise DataError(
            f"gate.max_open_fraction: {max_open_fraction:g} cannot be measured on {len(scores)} "
            "unused tokens of text that is not new; expected at least "
            f"{int(1 / max_open_fraction) + 1}: raise gate.tokens, or give more text"
        )
    # Gap k lies between below[k] and above[k], and k of the scores are above it.
    # In fp64: the middle of two neighbouring fp32 numbers may round to one of them.
    below = scores.sort(descending=True).values[: allowed + 1].clamp(min=0).double()
    above = torch.cat([below[:1] + 1, below[:-1]])
    gaps = above - below
    # Not the topmost gaps: they use little of the fraction that the user allows, and close more
    # new text than need be.
    fewest = allowed // 2
    place = fewest + int(gaps[fewest:].argmax())
    if gaps[place] < _EQUAL:
        # Gap 0, above the highest score, was made 1 wide: there is always one.
        place = int((gaps >= _EQUAL).nonzero().max())
    return float((above[place] + below[place]) / 2)
