"""Properties of axes, labels and formatted numbers that hold for any figures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from studies.report.drawing import (
    Box,
    Drawing,
    log_axis,
    moved_apart,
    padded_axis,
    place_labels,
    step_axis,
)
from studies.report.formats import change, count, number, of_figure, percent
from studies.report.groups import PERPLEXITY

MAKERS = {
    "changes": lambda values, start, end: padded_axis(
        [0.0, *values], start, end, change
    ).with_ticks(PERPLEXITY.rounds),
    "steps": lambda values, start, end: step_axis(max(values), start, end),
    "logarithmic": lambda values, start, end: log_axis([10**value for value in values], start, end),
}


@pytest.mark.parametrize("name", MAKERS)
@given(st.lists(st.floats(-15, 15), min_size=1, max_size=9), st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(name, values, upright):
    start, end = (400.0, 30.0) if upright and name != "steps" else (50.0, 700.0)
    if name == "steps":
        values = [round(10 ** abs(value / 3)) for value in values]
    axis = MAKERS[name](values, start, end)
    low, high = sorted((start, end))
    if name == "logarithmic":
        values = [10**value for value in values]
    for value in [*values, *axis.ticks]:
        assert low - 1e-6 <= axis(value) <= high + 1e-6
    assert axis.ticks and list(axis.ticks) == sorted(set(axis.ticks))
    assert all(after - before > 20 for before, after in pairwise(sorted(map(axis, axis.ticks))))
    words = [axis.words(tick) for tick in axis.ticks]
    assert len(set(words)) == len(words) or max(map(len, words)) > 8


@given(st.lists(st.floats(0, 300), min_size=1, max_size=9))
def test_labels_at_the_ends_of_lines_stay_apart(places):
    found = moved_apart(places, 16, 0, 300)
    assert all(after - before >= 16 - 1e-6 for before, after in pairwise(sorted(found)))
    assert min(found) >= -1e-6 and max(found) <= 300 + 1e-6
    assert [found[at] for at in sorted(range(len(places)), key=places.__getitem__)] == sorted(found)
    if all(after - before >= 16 for before, after in pairwise(sorted(places))):
        assert found == pytest.approx(places)


@given(st.lists(st.tuples(st.floats(20, 780), st.floats(20, 380)), min_size=1, max_size=5))
def test_labels_of_marks_stay_in_the_room_and_apart(points):
    assume(all(math.dist(a, b) > 120 for i, a in enumerate(points) for b in points[:i]))
    boxes = place_labels(points, [60.0] * len(points), 16.0, [], Box(0, 0, 800, 400))
    for index, box in enumerate(boxes):
        assert box.overlap(Box(0, 0, 800, 400)) == pytest.approx(60 * 16)
        assert all(box.overlap(other) < 1 for other in boxes[:index])


def test_marks_in_one_place_do_not_all_get_a_label():
    boxes = [
        box
        for box in place_labels([(400.0, 200.0)] * 40, [60.0] * 40, 16.0, [], Box(0, 0, 800, 400))
        if box
    ]
    assert 4 < len(boxes) < 40
    assert all(
        box.overlap(other) <= 1 for index, box in enumerate(boxes) for other in boxes[:index]
    )


def test_numbers_are_written_as_people_do():
    space = "\N{NARROW NO-BREAK SPACE}"
    changes = [
        change(math.log(ratio)) for ratio in (0.39, 0.002, 0.0001, 1.0, 1.015, 1.2, 2, 12345)
    ]
    expected = [
        f"−61{space}%",
        f"−99.8{space}%",
        "÷10,000",
        f"0{space}%",
        f"+1.5{space}%",
        f"+20{space}%",
    ]
    assert changes == [*expected, "×2", "×12,345"]
    assert change(math.inf) == "∞"
    assert [percent(share) for share in (0.0, 0.005, 0.12, 1.0)] == [
        f"{n}{space}%" for n in ("0", "0.5", "12", "100")
    ]
    assert [count(n) for n in (812, 45_200, 1_236_000_000)] == [
        "812",
        f"45.2{space}k",
        f"1.24{space}B",
    ]
    assert [number(n) for n in (1.5, 17.24, 12_300)] == ["1.50", "17.24", "12,300.00"]
    assert [of_figure("perplexity")(n) for n in (6.5, 1234.5, math.inf)] == [
        "6.50",
        "1,234.50",
        "∞",
    ]


def test_marks_differ_in_shape_or_colour():
    drawings = [Drawing(10, 10) for _ in range(49)]
    for style, drawing in enumerate(drawings):
        drawing.mark((5, 5), style)
    assert len({drawing.parts[0] for drawing in drawings}) == 49


def test_large_numbers_are_written_as_powers_of_ten():
    assert [number(value) for value in (99_999, 123_456, 1e8, 1.2e15)] == [
        "99,999.00",
        "1.2·10⁵",
        "10⁸",
        "1.2·10¹⁵",
    ]
    assert [change(math.log(ratio)) for ratio in (1e8, 1e-8, 23_441.0, 2.5e6)] == [
        "×10⁸",
        "÷10⁸",
        "×23,441",
        "×2.5·10⁶",
    ]
    axis = log_axis([1.0, 1e9], 50.0, 700.0)
    assert not any("e+" in axis.words(tick) for tick in axis.ticks)
