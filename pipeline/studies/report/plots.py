"""Two kinds of plots: the plane of learning against forgetting, and panels of lines over steps or layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.run_folder.metrics import mean
from pipeline.studies.report.axes import Axis, distance_axis, step_axis
from pipeline.studies.report.runs import Measure, Standing
from pipeline.studies.report.svg import (
    Box,
    Drawing,
    Point,
    around,
    place_labels,
    shortened,
    spread,
    style_class,
    text_width,
)

_PLANE_LABEL = 13.0
_PLANE_LEFT, _PLANE_TOP, _PLANE_BOTTOM = 68.0, 34.0, 58.0
_NAMES = 0.13  # of the width at most is kept free for names at the right


@dataclass(frozen=True)
class Plane:
    """A drawing with axes for standings: learned to the right, forgotten upwards."""

    drawing: Drawing
    x: Axis
    y: Axis

    def at(self, place: Standing) -> Point:
        """The pixel of a standing."""
        return self.x(place.learned), self.y(place.forgotten)

    def path(self, places: Iterable[Standing], style: str) -> None:
        """A line through them, in their order."""
        self.drawing.path([self.at(place) for place in places], style)

    def name(self, named: Sequence[tuple[str, Standing]], others: Iterable[Standing] = ()) -> None:
        """Marks the base, and labels every point, with a leader line where the label is further away.

        No label covers the marks of the points or of `others`.
        """
        drawing, x, y = self.drawing, self.x, self.y
        base = (x(0), y(0))
        drawing.ring(base, 5, "base")
        ends = [self.at(place) for _, place in named]
        names = ["base", *(shortened(name, _PLANE_LABEL, 0.4 * drawing.width) for name, _ in named)]
        room = Box(x.start, y.end - 8, drawing.width, y.start)
        hint = Box(x.end - 64, y.start - 20, x.end, y.start)
        marks = [around(point, 12) for point in (*ends, *map(self.at, others))]
        widths = [text_width(name, _PLANE_LABEL) for name in names]
        boxes = place_labels([base, *ends], widths, _PLANE_LABEL + 3, [hint, *marks], room)
        for name, point, box in zip(names, [base, *ends], boxes, strict=True):
            near = (min(max(point[0], box.left - 2), box.right + 2), (box.top + box.bottom) / 2)
            if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 22:
                drawing.line(point, near, "leader")
            drawing.text((box.left, box.bottom - 4), name, "label")


def open_plane(
    drawing: Drawing, places: Sequence[Standing], labels: Iterable[str], measure: Measure, learned: str, kept: str
) -> Plane:
    """Draws axes with room for `places` and, at the right, for `labels`; `learned` and `kept` name the corpora."""
    names = max(text_width(label, _PLANE_LABEL) for label in labels)
    right = drawing.width - min(names, _NAMES * drawing.width)
    across, up = measure.rounds(measure.better), measure.rounds(-measure.better)
    x = distance_axis([place.learned for place in places], _PLANE_LEFT, right, measure.on_new, across)
    y = distance_axis(
        [place.forgotten for place in places], drawing.height - _PLANE_BOTTOM, _PLANE_TOP, measure.on_kept, up
    )
    _draw_grid(drawing, x, y)
    drawing.text((0, 14), f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {kept}", "axis")
    drawing.text((right, y.start + 42), f"learned: {measure.noun}, {learned} \N{RIGHTWARDS ARROW}", "axis", "end")
    return Plane(drawing, x, y)


def _draw_grid(drawing: Drawing, x: Axis, y: Axis) -> None:
    left, right, top, bottom = x.start, x.end, y.end, y.start
    for tick in x.ticks:
        drawing.line((x(tick), top), (x(tick), bottom), "zero" if tick == 0 else "grid")
        drawing.text((x(tick), bottom + 18), x.words(tick) if tick else "0", "tick", "middle")
    for tick in y.ticks:
        drawing.line((left, y(tick)), (right, y(tick)), "zero" if tick == 0 else "grid")
        drawing.text((left - 8, y(tick) + 4), y.words(tick) if tick else "0", "tick", "end")
    drawing.text((right - 4, bottom - 6), "better \N{SOUTH EAST ARROW}", "hint", "end")


_LABEL = 12.5
_LINE = 16.0
_LEFT, _TOP, _BOTTOM = 52.0, 36.0, 46.0
_GAP = 20.0  # below a panel
_SIDE_BY_SIDE_FROM = 600.0

MakeAxis = Callable[[Iterable[float], float, float], Axis]
"""(values, first pixel, last pixel) -> axis"""


@dataclass(frozen=True)
class Series:
    """The lines of one group: each has the points of a run, sorted by x."""

    label: str
    style: int
    lines: Sequence[Sequence[Point]]

    @property
    def middle(self) -> list[Point]:
        """The mean over the runs, where all of them have a point."""
        values = [dict(line) for line in self.lines]
        shared = sorted(set.intersection(*map(set, values)))
        return [(x, mean([line[x] for line in values])) for x in shared]


@dataclass(frozen=True)
class Panel:
    """A chart: its heading, its lines, and how its axes are made; `across` is the label of the horizontal one."""

    heading: str
    series: Sequence[Series]
    y_axis: MakeAxis
    across: str
    x_axis: MakeAxis = step_axis
    marked: bool = False
    """whether every point of a mean gets a mark, not only the last"""

    @property
    def height(self) -> float:
        return max(280.0, _TOP + _BOTTOM + _LINE * len(self.series)) + _GAP


def panels_height(panels: Sequence[Panel], width: float) -> float:
    """The height of a drawing of `panels`, in CSS pixels."""
    rows = [panels[at : at + _columns(panels, width)] for at in range(0, len(panels), _columns(panels, width))]
    return sum(max(panel.height for panel in row) for row in rows)


def draw_panels(drawing: Drawing, panels: Sequence[Panel]) -> None:
    """Draws all panels, two in a row where the drawing is wide enough."""
    columns = _columns(panels, drawing.width)
    top = 0.0
    for at in range(0, len(panels), columns):
        row = panels[at : at + columns]
        height = max(panel.height for panel in row)
        for column, panel in enumerate(row):
            wide = drawing.width / columns
            right = (column + 1) * wide - (18 if column < columns - 1 else 0)
            _draw_panel(drawing, panel, column * wide, right, top, height - _GAP)
        top += height


def _columns(panels: Sequence[Panel], width: float) -> int:
    return 2 if width >= _SIDE_BY_SIDE_FROM and len(panels) > 1 else 1


def _draw_panel(drawing: Drawing, panel: Panel, left: float, right: float, top: float, height: float) -> None:
    points = [point for own in panel.series for line in own.lines for point in line if math.isfinite(point[1])]
    if not points:
        drawing.text((left, top + 14), f"{panel.heading}: no finite figure", "axis")
        return
    names = min(max(text_width(own.label, _LABEL) for own in panel.series), 0.36 * (right - left))
    x = panel.x_axis((at for at, _ in points), left + _LEFT, right - names - 22)
    y = panel.y_axis((value for _, value in points), top + height - _BOTTOM, top + _TOP)
    drawing.text((left, top + 14), panel.heading, "axis")
    for tick in y.ticks:
        drawing.line((x.start, y(tick)), (x.end, y(tick)), "grid")
        drawing.text((x.start - 8, y(tick) + 4), y.words(tick), "tick", "end")
    for tick in x.ticks:
        drawing.line((x(tick), y.start), (x(tick), y.start + 4), "zero")
        drawing.text((x(tick), y.start + 18), x.words(tick), "tick", "middle")
    drawing.line((x.start, y.start), (x.end, y.start), "zero")
    drawing.text(((x.start + x.end) / 2, y.start + 37), panel.across, "tick", "middle")
    for own in panel.series:
        for line in own.lines if len(own.lines) > 1 else ():
            drawing.path(_pixels(line, x, y), f"way {style_class(own.style)}")
    for own in panel.series:
        middle = _pixels(own.middle, x, y)
        drawing.path(middle, f"line {style_class(own.style)}")
        for point in middle if panel.marked else middle[-1:]:
            drawing.mark(point, own.style, size=0.8)
    _draw_names(drawing, panel, x, y, names)


def _draw_names(drawing: Drawing, panel: Panel, x: Axis, y: Axis, width: float) -> None:
    """The name of each line at its end; names are moved apart where ends are close."""
    named = [(own.label, points[-1]) for own in panel.series if (points := _pixels(own.middle, x, y))]
    heights = spread([point[1] for _, point in named], _LINE, y.end, y.start)
    for (label, point), height in zip(named, heights, strict=True):
        drawing.line((point[0] + 6, point[1]), (x.end + 14, height), "leader")
        drawing.text((x.end + 17, height + 4), shortened(label, _LABEL, width), "label small")


def _pixels(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    return [(x(at), y(value)) for at, value in points if math.isfinite(value)]
