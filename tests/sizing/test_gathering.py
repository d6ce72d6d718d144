"""ZeRO-3's gathering, where arithmetic says what it must be; test_against_runs.py holds it to DeepSpeed itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.sizing.micro_batch import Fetch, Gathering, GatherSettings, simulate_gathering

SIZES = [10, 20, 30, 5]
FORWARD = [Fetch((index,), releases=True) for index in range(len(SIZES))]
THERE_AND_BACK = FORWARD + FORWARD[::-1]


def settings(**changes):
    values = {"prefetch_bucket_size": 0, "param_persistence_threshold": 0, "max_reuse_distance": 0}
    return GatherSettings(**{**values, **changes})


def test_without_reuse_every_module_gathers_its_own():
    # A module that follows itself, at the turn, keeps what it has.
    assert simulate_gathering(THERE_AND_BACK, SIZES, settings()) == Gathering(2 * 65, 30)


def test_within_the_reuse_distance_each_parameter_is_gathered_once():
    assert simulate_gathering(THERE_AND_BACK, SIZES, settings(max_reuse_distance=1000)) == Gathering(65, 65)


def test_small_parameters_are_never_gathered():
    assert simulate_gathering(FORWARD, SIZES, settings(param_persistence_threshold=10)) == Gathering(50, 30)


def test_a_module_whose_end_goes_unnoticed_keeps_its_parameters():
    held = [Fetch(one.parameters, releases=False) for one in FORWARD]
    assert simulate_gathering(held, SIZES, settings()) == Gathering(65, 65)


def test_prefetching_gathers_ahead_but_no_more():
    assert simulate_gathering(FORWARD, SIZES, settings(prefetch_bucket_size=20)) == Gathering(65, 50)


@given(
    fetches=st.lists(st.tuples(st.sets(st.integers(0, 7), max_size=3), st.booleans()), max_size=40),
    sizes=st.lists(st.integers(1, 100), min_size=8, max_size=8),
    prefetch=st.integers(0, 200),
    live=st.integers(0, 500),
    reuse=st.integers(0, 500),
)
def test_what_is_used_is_there_and_no_module_gathers_twice(fetches, sizes, prefetch, live, reuse):
    trace = [Fetch(tuple(sorted(parameters)), releases) for parameters, releases in fetches]
    chosen = settings(prefetch_bucket_size=prefetch, max_live_parameters=live, max_reuse_distance=reuse)
    result = simulate_gathering(trace, sizes, chosen)
    used = {index for one in trace for index in one.parameters}
    largest = max((sum(sizes[index] for index in one.parameters) for one in trace), default=0)
    assert sum(sizes[index] for index in used) <= result.gathered
    assert result.gathered <= sum(sizes[index] for one in trace for index in one.parameters)
    assert largest <= result.most_at_once <= sum(sizes)
