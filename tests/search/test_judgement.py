"""Who learned most within the budget, as pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.method import ExpansionWidths, ScaleMethod
from pipeline.search.candidates import Candidate
from pipeline.search.frontier import Point, frontier, verdict
from pipeline.search.judgement import (
    USUAL_EXPONENT,
    Judged,
    Probe,
    expected_increase,
    growth_exponent,
    ranked,
    survivors,
)

WHOLE_STEPS = 100
METHOD = ScaleMethod(
    name="scale",
    variant="preserve",
    expansion=ExpansionWidths(hidden_size=8, intermediate_size=8, num_attention_heads=1),
)
INCREASES = st.floats(-0.5, 1e4) | st.just(math.inf) | st.just(math.nan)
PERPLEXITIES = st.floats(1.0, 1e6) | st.just(math.inf)
POINTS = st.builds(Point, st.just("run"), st.integers(1, 5).map(float), st.integers(1, 5).map(float))


def probe(steps: int, increase: float, new: float = 5.0) -> Probe:
    return Probe(steps, new, 10.0 * (1 + increase), 10.0, increase)


def judged(increase: float, new: float = 5.0, *, name: str = "one", trained: int = 1, budget: float = 0.2) -> Judged:
    return Judged(Candidate(name, METHOD, trained, 1e-3), (probe(WHOLE_STEPS, increase, new),), budget, WHOLE_STEPS)


@st.composite
def fields(draw) -> list[Judged]:
    drawn = draw(st.lists(st.tuples(INCREASES, PERPLEXITIES, st.integers(1, 3)), min_size=1, max_size=12))
    return [
        judged(increase, new, name=f"candidate-{number}", trained=trained)
        for number, (increase, new, trained) in enumerate(drawn)
    ]


@given(fields())
def test_within_the_budget_learning_counts_and_beyond_it_forgetting(field):
    best_first = ranked(field)
    feasible = [one for one in best_first if one.feasible]
    assert best_first[: len(feasible)] == feasible
    learned = [one.probes[-1].new_perplexity for one in feasible]
    forgotten = [one.expected_increase for one in best_first[len(feasible) :]]
    assert learned == sorted(learned)
    assert forgotten == sorted(forgotten)


@given(fields(), st.floats(0.01, 1.0))
def test_the_best_and_the_least_forgetful_survive(field, keep):
    kept = survivors(field, keep)
    assert kept[0] == ranked(field)[0]
    assert min(one.expected_increase for one in kept) == min(one.expected_increase for one in field)
    assert math.ceil(keep * len(field)) <= len(kept) <= math.ceil(keep * len(field)) + 1
    assert len({one.candidate.shape for one in kept}) == len(kept)


@given(fields(), st.randoms())
def test_the_order_of_the_candidates_decides_nothing(field, random):
    shuffled = random.sample(field, len(field))
    assert survivors(shuffled, 0.5) == survivors(field, 0.5)


def test_of_equals_the_smaller_is_better():
    small, large = judged(0.1, name="b", trained=1), judged(0.1, name="a", trained=2)
    assert ranked([large, small]) == [small, large]


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 49), st.integers(50, 99))
def test_a_longer_run_is_expected_to_forget_more_but_not_more_than_in_proportion(early, late, first, second):
    probes = (probe(first, early), probe(second, late))
    expected = expected_increase(probes, WHOLE_STEPS)
    assert expected >= late * (1 - 1e-9)
    assert math.log1p(expected) <= math.log1p(late) * WHOLE_STEPS / second * (1 + 1e-9)
    assert expected_increase(probes, second) == late


def test_forgetting_goes_on_as_the_last_two_probes_went():
    nats = [0.1, 0.2, 0.2 * 2**0.25]
    path = [probe(steps, math.expm1(one)) for steps, one in zip((10, 20, 40), nats, strict=True)]
    assert growth_exponent(path[:1]) == USUAL_EXPONENT
    assert growth_exponent(path[:2]) == pytest.approx(1.0)
    assert growth_exponent(path) == pytest.approx(0.25)
    assert math.log1p(expected_increase(path, 160)) == pytest.approx(0.2 * 2**0.75)
    assert growth_exponent([probe(10, 0.2), probe(20, 0.1)]) == 0.0
    assert growth_exponent([probe(10, -0.1), probe(20, 0.1)]) == USUAL_EXPONENT


def test_what_is_no_number_is_the_worst():
    assert expected_increase((), WHOLE_STEPS) == math.inf
    assert expected_increase((probe(10, math.nan),), WHOLE_STEPS) == math.inf
    assert not judged(math.nan, budget=1e9).feasible
    assert expected_increase((probe(10, 1e200), probe(20, 1e250)), WHOLE_STEPS) == math.inf
    assert expected_increase((probe(10, -0.1),), WHOLE_STEPS) == -0.1


@given(st.lists(POINTS, min_size=1), POINTS)
def test_a_choice_is_behind_a_frontier_if_and_only_if_a_run_beats_it(by_hand, choice):
    best = frontier(by_hand)
    assert all(not one.beats(other) for one in best for other in best)
    assert all(one in best or any(other.beats(one) for other in best) for one in by_hand)
    said = verdict(choice, by_hand)
    assert said.startswith("behind") == any(one.beats(choice) for one in by_hand)
    assert said.startswith("beyond") == any(choice.beats(one) for one in best)
