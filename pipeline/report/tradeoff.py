"""The picture that a method is chosen by: what was forgotten against what was learned."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.report.axes import Axis, distance_axis
from pipeline.report.groups import Group
from pipeline.report.labels import Box, around, beside
from pipeline.report.standing import Measure, Standing
from pipeline.report.svg import Drawing, Point, shortened, style_class, text_width
from pipeline.run_folder.averages import spread
from pipeline.run_folder.study_summary import Row

_LABEL = 13.0
_LEFT, _TOP, _BOTTOM = 68.0, 34.0, 58.0
_NAMES = 0.13  # of the width, at most, is kept free for names at the right


def draw_tradeoff(drawing: Drawing, groups: Sequence[Group], measure: Measure, learned: str, kept: str) -> None:
    """Learning to the right, forgetting upwards: a small mark a run, a large one and a name for the mean of a method's,
    bars of one standard deviation, and the way from the base as a thin line.

    Groups without a standing are left out. `learned` and `kept` name the corpora.
    """
    placed = [(one, place) for one in groups if (place := one.standing(measure))]
    ways = [(one, [_way(row, measure) for row in one.rows]) for one, _ in placed]
    places = [place for _, of in ways for way in of for place in way]
    names = max(text_width(one.label, _LABEL) for one, _ in placed)
    right = drawing.width - min(names, _NAMES * drawing.width)
    across, up = measure.rounds(measure.better), measure.rounds(-measure.better)
    x = distance_axis([one.learned for one in places], _LEFT, right, measure.on_new, across)
    y = distance_axis([one.forgotten for one in places], drawing.height - _BOTTOM, _TOP, measure.on_kept, up)
    _draw_frame(drawing, x, y)
    drawing.text((0, 14), f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {kept}", "axis")
    drawing.text((right, y.start + 42), f"learned: {measure.noun}, {learned} \N{RIGHTWARDS ARROW}", "axis", "end")
    for one, of in ways:
        for way in of:
            drawing.path([(x(place.learned), y(place.forgotten)) for place in way], f"way {style_class(one.index)}")
    for one, place in placed:
        _draw_group(drawing, one, place, measure, x, y)
    _draw_names(drawing, placed, x, y)


def _way(row: Row, measure: Measure) -> list[Standing]:
    """From the base to the end."""
    return [place for look in row.looks if (place := measure.standing(row, look.figures))]


def _draw_frame(drawing: Drawing, x: Axis, y: Axis) -> None:
    left, right, top, bottom = x.start, x.end, y.end, y.start
    for tick in x.ticks:
        drawing.line((x(tick), top), (x(tick), bottom), "zero" if tick == 0 else "grid")
        drawing.text((x(tick), bottom + 18), x.words(tick) if tick else "0", "tick", "middle")
    for tick in y.ticks:
        drawing.line((left, y(tick)), (right, y(tick)), "zero" if tick == 0 else "grid")
        drawing.text((left - 8, y(tick) + 4), y.words(tick) if tick else "0", "tick", "end")
    drawing.text((right - 4, bottom - 6), "better \N{SOUTH EAST ARROW}", "hint", "end")


def _draw_group(drawing: Drawing, one: Group, middle: Standing, measure: Measure, x: Axis, y: Axis) -> None:
    def said(place: Standing) -> str:
        return f"learned {measure.on_new(place.learned)}, forgot {measure.on_kept(place.forgotten)}"

    ends = [(row, end) for row in one.rows if (end := measure.standing(row, row.after))]
    for row, end in ends if len(ends) > 1 else ():
        seed = f", seed {row.seed}" if row.seed is not None else ""
        title = f"{one.label}{seed}: {said(end)}"
        drawing.mark((x(end.learned), y(end.forgotten)), one.index, "run", size=0.5, title=title)
    across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
    if across is not None and up is not None:
        bar, at = f"spread {style_class(one.index)}", (x(middle.learned), y(middle.forgotten))
        drawing.line((x(middle.learned - across), at[1]), (x(middle.learned + across), at[1]), bar)
        drawing.line((at[0], y(middle.forgotten - up)), (at[0], y(middle.forgotten + up)), bar)
    drawing.mark((x(middle.learned), y(middle.forgotten)), one.index, title=f"{one.label}: {said(middle)}")


def _draw_names(drawing: Drawing, placed: Sequence[tuple[Group, Standing]], x: Axis, y: Axis) -> None:
    base = (x(0), y(0))
    drawing.ring(base, 5, "base")
    ends: list[Point] = [(x(place.learned), y(place.forgotten)) for _, place in placed]
    names = ["base", *(shortened(one.label, _LABEL, 0.4 * drawing.width) for one, _ in placed)]
    room = Box(x.start, y.end - 8, drawing.width, y.start)
    hint = Box(x.end - 64, y.start - 20, x.end, y.start)
    bars = [around(point, 12) for point in ends]
    widths = [text_width(name, _LABEL) for name in names]
    boxes = beside([base, *ends], widths, _LABEL + 3, [hint, *bars], room)
    for name, point, box in zip(names, [base, *ends], boxes, strict=True):
        near = (min(max(point[0], box.left - 2), box.right + 2), (box.top + box.bottom) / 2)
        if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 22:
            drawing.line(point, near, "leader")
        drawing.text((box.left, box.bottom - 4), name, "label")
