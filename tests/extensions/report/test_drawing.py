"""Axes and marks, for any values."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from pipeline.extensions.report.figures.drawing import (
    Drawing,
    fitting_ticks,
    log_tick,
    mark,
    padded,
    printable,
    set_log_axis,
    set_step_axis,
)
from studies.report.groups import PERPLEXITY

WIDTH, HEIGHT = 650.0, 370.0


@pytest.fixture(scope="module")
def axes() -> Axes:
    return Drawing(WIDTH, HEIGHT, "test").add_axes(0, 0, WIDTH, HEIGHT)


def shown_ticks(axis, low: float, high: float) -> list[float]:
    return [tick for tick in axis.get_majorticklocs() if low <= tick <= high]


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=9))
def test_an_axis_of_changes_has_round_ticks_that_are_apart(values):
    low, high = padded(min(0.0, *values), max(0.0, *values))
    gap = 76 * (high - low) / WIDTH
    ticks = fitting_ticks(PERPLEXITY.rounds, (low, high), gap)
    assert ticks == sorted(set(ticks)) and 0.0 in ticks
    assert low < min(0.0, *values) and max(0.0, *values) < high
    assert all(low <= tick <= high for tick in ticks)
    assert all(after - before >= gap for before, after in pairwise(ticks))


@given(st.floats(0, 5))
def test_an_axis_of_steps_has_whole_numbers(axes, power):
    last = float(round(10**power))
    set_step_axis(axes, last, WIDTH)
    low, high = axes.get_xlim()
    ticks = shown_ticks(axes.xaxis, low, high)
    assert (low, high) == (0.0, max(1.0, last))
    assert ticks[0] == 0.0 and all(tick == int(tick) for tick in ticks)
    assert 2 <= len(ticks) <= WIDTH / 80 + 1


@given(st.lists(st.floats(-15, 300), min_size=1, max_size=9))
def test_a_logarithmic_axis_holds_its_values_and_its_ticks(axes, powers):
    values = [10**power for power in powers]
    set_log_axis(axes, values)
    low, high = axes.get_ylim()
    assert low < min(values) and max(values) < high
    ticks = shown_ticks(axes.yaxis, low, high)
    assert ticks, "an axis without numbers"
    places = [axes.transData.transform((0, tick))[1] for tick in ticks]
    assert all(after - before > 12 for before, after in pairwise(places))
    words = [log_tick(tick) for tick in ticks]
    assert len(set(words)) == len(words) or max(map(len, words)) > 8
    assert not any("e+" in word for word in words)


def test_marks_differ_in_shape_or_colour():
    marks = [mark(style) for style in range(49)]
    assert len({(one.get_marker(), one.get_markerfacecolor()) for one in marks}) == 49


def test_letters_that_xml_cannot_contain_are_replaced():
    assert (
        printable("a\x00b\ud800c\nd") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c d"
    )
    assert printable("$x$ 한국어 <b>") == "$x$ 한국어 <b>"


def test_positions_are_pixels_from_the_top_left():
    drawing = Drawing(200, 100, "test")
    axes = drawing.add_axes(20, 10, 120, 60)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    assert drawing.position(axes, (0, 0)) == pytest.approx((20, 60))
    assert drawing.position(axes, (1, 1)) == pytest.approx((120, 10))
    assert math.isclose(drawing.figure.get_figwidth() * 72, 200)
