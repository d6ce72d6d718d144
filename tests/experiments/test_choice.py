"""The learning rate a method is compared at, and when the study is over, as pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiments.conduct import time_left
from pipeline.experiments.pending import best_learning_rate, is_at_the_edge

RATES = st.floats(1e-6, 1.0)
PERPLEXITIES = st.floats(1.0, 1e6) | st.just(math.inf) | st.just(math.nan)


@given(st.dictionaries(RATES, PERPLEXITIES, min_size=1))
def test_no_other_rate_learned_more(perplexities):
    best = best_learning_rate(perplexities)
    finite = [value for value in perplexities.values() if math.isfinite(value)]
    if finite:
        assert perplexities[best] == min(finite)
        assert all(rate >= best for rate, value in perplexities.items() if value == perplexities[best])


def test_the_edge_of_a_grid_is_where_a_better_rate_may_lie_beyond():
    assert [is_at_the_edge(rate, [3.0, 1.0, 2.0]) for rate in (1.0, 2.0, 3.0)] == [True, False, True]
    assert not is_at_the_edge(1.0, [1.0])


@pytest.mark.parametrize(
    ("running", "waiting", "typical", "jobs", "left"),
    [
        ([], 0, None, 2, 0.0),
        ([None], 3, None, 2, None),
        ([40.0], 1, None, 1, None),
        ([40.0, 20.0], 0, None, 2, 40.0),
        ([None, 20.0], 4, 60.0, 2, 160.0),
    ],
)
def test_the_time_left(running, waiting, typical, jobs, left):
    assert (time_left(running, waiting, typical, jobs) if running or waiting else 0.0) == left
