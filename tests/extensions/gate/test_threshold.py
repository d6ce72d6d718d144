"""The threshold of a gate: by what closing new text costs, and by how much other text opens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.extensions.gate.threshold import (
    Closing,
    threshold_by_cost,
    threshold_by_open_fraction,
)

TOKENS = st.lists(st.tuples(st.integers(-9, 9), st.floats(-0.5, 2)), min_size=1, max_size=30)


def closing(tokens: list[tuple[float, float]]) -> Closing:
    scores, nats = zip(*tokens, strict=True)
    return Closing(
        torch.tensor(scores).float(),
        torch.tensor(nats, dtype=torch.double),
        torch.zeros(len(scores), dtype=torch.bool),
    )


@given(tokens=TOKENS, max_cost=st.floats(0.001, 0.5))
def test_no_higher_threshold_costs_as_little(tokens, max_cost):
    found = closing(tokens)
    threshold = threshold_by_cost(found, max_cost, 1.0)
    assert found.cost(threshold) <= max_cost + 1e-9
    for score, _ in tokens:
        # Closing one more kind of score costs too much.
        assert score < threshold or found.cost(score + 0.5) > max_cost - 1e-9
    assert (found.scores - threshold).abs().min() >= 0.4


def test_the_cost_is_that_of_the_closed_tokens_over_all_tokens():
    found = closing([(1.0, 0.2), (2.0, 0.4), (3.0, 1.0), (4.0, 0.0)])
    assert found.cost(0.0) == 0.0
    assert found.cost(2.5) == pytest.approx(math.expm1(0.6 / 4))
    assert threshold_by_cost(found, math.expm1(0.6 / 4) + 1e-6, 1.0) == 2.5
    assert threshold_by_cost(found, 1e-6, 1.0) == 0.5


def test_what_training_did_not_improve_is_closed_up_to_a_share():
    found = closing([(1.0, 0.0), (5.0, -0.1), (7.0, 0.0), (8.0, 0.0)])
    assert threshold_by_cost(found, 0.01, 0.25) == 3.0
    assert threshold_by_cost(found, 0.01, 0.5) == 6.0
    assert threshold_by_cost(found, 0.01, 0.1) == 0.5


def test_tokens_that_are_open_by_their_ids_cost_nothing():
    found = closing([(1.0, 5.0), (2.0, 0.001), (3.0, 5.0), (4.0, 5.0)])
    always = found._replace(is_always_open=torch.tensor([True, False, False, False]))
    assert threshold_by_cost(found, 0.01, 0.5) == 0.5
    assert threshold_by_cost(always, 0.01, 0.5) == 2.5
    assert always.cost(2.5) == pytest.approx(math.expm1(0.001 / 4))


def test_tokens_of_one_state_are_not_split():
    """Their scores differ by rounding; the first of them would be cheap enough to close."""
    found = closing([(1.0, 0.001), (1.0 + 1e-5, 0.4), (3.0, 0.4)])
    assert threshold_by_cost(found, 0.01, 1.0) == 0.5


@given(tokens=TOKENS, max_cost=st.floats(0.001, 0.5), start=st.integers(-12, 12))
def test_the_token_with_which_every_document_starts_stays_closed(tokens, max_cost, start):
    found = closing(tokens)
    free = threshold_by_cost(found, max_cost, 1.0)
    threshold = threshold_by_cost(found, max_cost, 1.0, start_score=float(start))
    assert threshold > start
    if free > start + 1:
        assert threshold == free
    # As little more is closed as that takes.
    above = found.scores[found.scores > start]
    if free < start and len(above):
        assert threshold < above.min()


@given(
    scores=st.lists(st.integers(-20, 20), min_size=10, max_size=60), fraction=st.floats(0.1, 0.9)
)
def test_the_threshold_keeps_within_the_budget_and_away_from_every_score(scores, fraction):
    found = torch.tensor(scores, dtype=torch.float32)
    threshold = threshold_by_open_fraction(found, fraction)
    above = int((found > threshold).sum())
    assert above <= fraction * len(found)
    assert threshold >= 0.5 and (found - threshold).abs().min() >= 0.5  # they are integers
    if above < int(fraction * len(found)) // 2:
        wanted = found.sort(descending=True).values[: int(fraction * len(found)) + 1].clamp(min=0)
        assert (wanted[above:] == wanted[above]).all(), "a lower gap had done"


def test_the_threshold_does_not_split_tokens_of_one_state():
    """The first tokens of all documents have one score, up to rounding; they are more than may
    open."""
    first = 0.7 + 1e-6 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    scores = torch.cat([first, torch.linspace(-9, -3, 900), torch.tensor([1.5, 3.0])])
    threshold = threshold_by_open_fraction(scores, 0.01)
    assert threshold == pytest.approx((0.7 + 1.5) / 2, abs=0.01)


def test_a_budget_that_cannot_be_measured_is_refused():
    with pytest.raises(
        DataError, match=r"0\.001 cannot be measured on 100 unused tokens .* at least 1001"
    ):
        threshold_by_open_fraction(torch.zeros(100), 0.001)
