"""Labels stay apart, for any places."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.extensions.report.figures.labels import (
    Box,
    moved_apart,
    place_labels,
    shortened,
    text_width,
    wrapped,
)


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


@given(st.text(min_size=1), st.floats(20, 400))
def test_a_label_is_cut_to_the_width_that_there_is(text, width):
    found = shortened(text, 13.0, width)
    assert found == text or found.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert (found == text) == (text_width(text, 13.0) <= width)


@given(st.text("ab cdé한 ", min_size=1), st.floats(40, 300))
def test_a_wrapped_text_has_all_its_words_in_lines_that_fit(text, width):
    lines = wrapped(text, 12, width)
    assert all(text_width(line, 12) <= width + 12 for line in lines)
    if all(text_width(word, 12) <= width for word in text.split()):
        assert " ".join(lines).split() == text.split()
    assert wrapped(text, 12, text_width(text, 12)) == [" ".join(text.split())]
