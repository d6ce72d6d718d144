"""Properties of axes, labels and formatted numbers that hold for any figures."""

from __future__ import annotations

import math
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import resvg_py
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.errors import MissingPackageError
from pipeline.studies.report import axes
from pipeline.studies.report.axes import change, count, duration, of_figure, percent, plus_minus, short
from pipeline.studies.report.page import write_pngs
from pipeline.studies.report.svg import Box, Drawing, place_labels, shortened, spread, text_width

ROOT = Path(__file__).parents[3]
VALUES = st.lists(st.floats(-30, 30), min_size=1, max_size=9)
POSITIVE = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=9)
MAKERS = {
    "changes": lambda values, start, end: axes.distance_axis(values, start, end, change, axes.round_changes()),
    "from zero": axes.axis_from_zero,
}


@pytest.mark.parametrize("name", MAKERS)
@given(VALUES, st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(name, values, upright):
    start, end = (400.0, 30.0) if upright else (50.0, 700.0)
    held(MAKERS[name](values, start, end), values, start, end)


@given(POSITIVE)
def test_a_logarithmic_axis_holds_its_values_and_its_ticks(values):
    axis = axes.log_axis(values, 400.0, 30.0)
    held(axis, values, 400.0, 30.0)
    assert axis(10 ** ((axis.low + axis.high) / 2)) == pytest.approx(215)


def held(axis, values, start, end):
    low, high = sorted((start, end))
    for value in [*values, *axis.ticks]:
        assert low - 1e-6 <= axis(value) <= high + 1e-6
    assert list(axis.ticks) == sorted(set(axis.ticks))
    pixels = sorted(map(axis, axis.ticks))
    assert all(after - before > 20 for before, after in pairwise(pixels))
    words = [axis.words(tick) for tick in axis.ticks]
    assert len(set(words)) == len(words) or max(map(len, words)) > 8


@given(st.lists(st.floats(0, 300), min_size=1, max_size=9))
def test_labels_at_the_ends_of_lines_stay_apart(places):
    found = spread(places, 16, 0, 300)
    order = sorted(found)
    assert all(after - before >= 16 - 1e-6 for before, after in pairwise(order))
    assert order[0] >= -1e-6 and order[-1] <= 300 + 1e-6
    for i, j in combinations(range(len(places)), 2):
        assert (places[i] < places[j]) <= (found[i] < found[j])
    apart = sorted(places)
    if all(after - before >= 16 for before, after in pairwise(apart)):
        assert found == pytest.approx(places)


@given(st.lists(st.tuples(st.floats(20, 780), st.floats(20, 380)), min_size=1, max_size=5))
def test_labels_of_marks_stay_in_the_room_and_apart(points):
    assume(all(math.dist(a, b) > 120 for i, a in enumerate(points) for b in points[:i]))
    room = Box(0, 0, 800, 400)
    boxes = place_labels(points, [60.0] * len(points), 16.0, [], room)
    for index, box in enumerate(boxes):
        assert box.overlap(room) == pytest.approx(60 * 16)
        assert all(box.overlap(other) < 1 for other in boxes[:index])


def test_numbers_are_written_as_people_do():
    space = "\N{NARROW NO-BREAK SPACE}"
    assert [change(math.log(ratio)) for ratio in (0.39, 0.0001, 1.015, 1.2, 2, 12345)] == [
        f"−61{space}%",
        "÷10,000",
        f"+1.5{space}%",
        f"+20{space}%",
        "×2",
        "×12,345",
    ]
    assert change(math.inf) == "∞" and change(0.0) == f"0{space}%"
    assert [percent(share) for share in (0.0, 0.005, 0.12, 1.0)] == [f"{n}{space}%" for n in ("0", "0.5", "12", "100")]
    assert [count(n) for n in (812, 45_200, 1_236_000_000)] == ["812", f"45.2{space}k", f"1.24{space}B"]
    assert [duration(s) for s in (12, 1800, 12_000, 400_000)] == ["12 s", "30 min", "3 h 20 min", "4.6 days"]
    assert [short(n) for n in (0.0341, 1.5, 17.24, 12_300, -2.0)] == ["0.034", "1.50", "17.2", "12,300", "−2.00"]
    assert plus_minus([6.0, 7.0], of_figure("perplexity")) == ("6.50", "± 0.71")
    assert plus_minus([6.0], of_figure("perplexity")) == ("6.00", "")
    assert plus_minus([6.0, math.inf], of_figure("perplexity")) == ("∞", "")


def test_a_name_that_is_too_long_is_cut():
    name = "a name that is much too long"
    cut = shortened(name, 12, 100)
    assert cut.endswith("…") and name.startswith(cut[:-1]) and text_width(cut, 12) <= 106
    assert shortened("short", 12, 100) == "short"


def test_marks_differ_in_shape_or_colour():
    marks = set()
    for style in range(49):
        drawing = Drawing("x", 10, 10, "t", "d")
        drawing.mark((5, 5), style)
        marks.add(drawing.markup())
    assert len(marks) == 49


@pytest.mark.parametrize("letter", [*"aZ09%,.-é", "×", "−", "±", "…", "↑", "→", "↘"])
@pytest.mark.parametrize("weight", [400, 600])
def test_the_shipped_fonts_have_the_letters_of_the_figures(letter, weight):
    def drawn(text: str) -> bytes:
        words = f'<text x="2" y="16" font-family="Inter" font-weight="{weight}">{text}</text>'
        return resvg_py.svg_to_bytes(
            svg_string=f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{words}</svg>',
            skip_system_fonts=True,
            font_dirs=[str(ROOT / "pipeline" / "studies" / "report" / "fonts")],
        )

    assert drawn(letter) not in (drawn(" "), drawn("\N{CJK UNIFIED IDEOGRAPH-4E00}"))


def test_pictures_need_their_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'scale-cpt\[report\]'"):
        write_pngs([], tmp_path)
