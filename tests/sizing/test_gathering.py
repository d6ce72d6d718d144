"""The formula for ZeRO-3's gathers in cases with a known answer; test_against_runs.py compares it with real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sizing.gathering import Gathering, GatherSettings, Segment, estimate_gathering

TIGHT = GatherSettings(
    prefetch_bucket_size=0, param_persistence_threshold=0, max_live_parameters=1000, max_reuse_distance=0
)
SIZES = [10, 20, 30, 5]
ONCE = [Segment((size,), (0,)) for size in SIZES]
THERE_AND_BACK = [Segment((size,), (1,)) for size in SIZES]


def test_without_a_backward_pass_each_parameter_is_gathered_once():
    assert estimate_gathering(ONCE, TIGHT).gathered == 65


def test_without_reuse_each_use_gathers():
    assert estimate_gathering(THERE_AND_BACK, TIGHT) == Gathering(130, 30)


def test_within_the_reuse_distance_each_parameter_is_gathered_once():
    assert estimate_gathering(THERE_AND_BACK, replace(TIGHT, max_reuse_distance=1000)) == Gathering(65, 65)


def test_the_upper_segments_are_those_that_stay():
    """Between the two uses of the third lie both of the fourth, 10 elements; of the second, 70; of the first, 110."""
    assert estimate_gathering(THERE_AND_BACK, replace(TIGHT, max_reuse_distance=70)).gathered == 65 + 10 + 20


def test_what_fits_into_max_live_parameters_stays_gathered():
    prefetching = replace(TIGHT, prefetch_bucket_size=1)
    assert estimate_gathering(THERE_AND_BACK, prefetching) == Gathering(65, 65)
    assert estimate_gathering(THERE_AND_BACK, replace(prefetching, max_live_parameters=35)) == Gathering(95, 65)


def test_small_parameters_are_never_gathered():
    persistent = replace(TIGHT, param_persistence_threshold=10)
    assert estimate_gathering(THERE_AND_BACK, persistent).gathered == 100
    assert estimate_gathering([Segment((5, 20), (1, 1))], persistent).gathered == 20 + 20


@pytest.mark.parametrize(("reuse", "gathered"), [(0, 6 * 40), (20, 4 * 40), (40, 2 * 40)])
def test_consecutive_uses_within_the_reuse_distance_gather_once(reuse, gathered):
    """Route's two forward calls, both again when recomputed, and two uses in the backward pass."""
    segments = [Segment((40,), (2,), forward_calls=2, recomputed=True), Segment((500,), (0,))]
    assert estimate_gathering(segments, replace(TIGHT, max_reuse_distance=reuse)).gathered == 500 + gathered


segments = st.lists(
    st.builds(
        lambda uses, calls, recomputed: Segment(*zip(*uses, strict=True), calls, recomputed),
        st.lists(st.tuples(st.integers(1, 100), st.integers(0, 2)), min_size=1, max_size=4),
        st.integers(1, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(segments, st.integers(0, 200), st.integers(0, 500), st.integers(0, 500), st.integers(0, 50))
def test_each_parameter_is_gathered_at_least_once_and_at_most_once_per_use(segments, prefetch, live, reuse, threshold):
    result = estimate_gathering(segments, GatherSettings(prefetch, threshold, live, reuse))
    once = most = largest = 0
    for segment in segments:
        passes = segment.forward_calls * (2 if segment.recomputed else 1)
        for size, uses in zip(segment.sizes, segment.backward_uses, strict=True):
            if size > threshold:
                once, most, largest = once + size, most + size * (passes + uses), max(largest, size)
    assert once <= result.gathered <= most
    assert largest <= result.most_at_once <= once
    roomier = estimate_gathering(segments, GatherSettings(prefetch, threshold, live, 10**6))
    assert roomier.gathered == once <= result.gathered
