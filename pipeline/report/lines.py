"""Lines over steps or layers: panels side by side where there is room, one below the other where there is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.report.axes import Axis, step_axis
from pipeline.report.labels import spread
from pipeline.report.svg import Drawing, Point, shortened, style_class, text_width
from pipeline.run_folder.averages import mean

_LABEL = 12.5
_LINE = 16.0
_LEFT, _TOP, _BOTTOM = 52.0, 36.0, 46.0
_GAP = 20.0  # below a panel
_SIDE_BY_SIDE_FROM = 600.0

MakeAxis = Callable[[Iterable[float], float, float], Axis]
"""Figures, first and last pixel -> their axis."""


@dataclass(frozen=True)
class Series:
    """One group's lines: each a run's points, sorted by their first figure."""

    label: str
    style: int
    lines: Sequence[Sequence[Point]]

    @property
    def middle(self) -> list[Point]:
        """The mean over the runs, where all of them have a point."""
        values = [dict(line) for line in self.lines]
        shared = sorted(set.intersection(*(set(one) for one in values)))
        return [(at, mean([one[at] for one in values])) for at in shared]


@dataclass(frozen=True)
class Panel:
    """A chart: its heading, its lines, and how its axes are made; `across` says what the horizontal one counts."""

    heading: str
    series: Sequence[Series]
    y_axis: MakeAxis
    across: str
    x_axis: MakeAxis = step_axis
    marked: bool = False
    """Whether each point of a mean has a mark, as where there are few."""

    @property
    def height(self) -> float:
        return max(280.0, _TOP + _BOTTOM + _LINE * len(self.series)) + _GAP


def panels_height(panels: Sequence[Panel], width: float) -> float:
    """How high a drawing of `panels` is."""
    rows = [panels[at : at + _columns(panels, width)] for at in range(0, len(panels), _columns(panels, width))]
    return sum(max(panel.height for panel in row) for row in rows)


def draw_panels(drawing: Drawing, panels: Sequence[Panel]) -> None:
    """All panels, row by row."""
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
    points = [point for one in panel.series for line in one.lines for point in line if math.isfinite(point[1])]
    if not points:
        drawing.text((left, top + 14), f"{panel.heading}: no finite figure", "axis")
        return
    names = min(max(text_width(one.label, _LABEL) for one in panel.series), 0.36 * (right - left))
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
    for one in panel.series:
        if len(one.lines) > 1:
            for line in one.lines:
                drawing.path(_pixels(line, x, y), f"way {style_class(one.style)}")
    for one in panel.series:
        middle = _pixels(one.middle, x, y)
        drawing.path(middle, f"line {style_class(one.style)}")
        for point in middle if panel.marked else middle[-1:]:
            drawing.mark(point, one.style, size=0.8)
    _draw_names(drawing, panel, x, y, names)


def _draw_names(drawing: Drawing, panel: Panel, x: Axis, y: Axis, width: float) -> None:
    """Each line's name at its end, moved apart where the ends are close."""
    named = [(one, points[-1]) for one in panel.series if (points := _pixels(one.middle, x, y))]
    heights = spread([point[1] for _, point in named], _LINE, y.end, y.start)
    for (one, point), height in zip(named, heights, strict=True):
        drawing.line((point[0] + 6, point[1]), (x.end + 14, height), "leader")
        drawing.text((x.end + 17, height + 4), shortened(one.label, _LABEL, width), "label small")


def _pixels(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    return [(x(at), y(value)) for at, value in points if math.isfinite(value)]
