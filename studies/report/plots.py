"""Two kinds of plots: the plane of learning against forgetting, and panels of lines over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.run_folder.metrics import mean
from studies.report.drawing import (
    Axis,
    Box,
    Drawing,
    Point,
    around,
    log_axis,
    moved_apart,
    padded_axis,
    place_labels,
    shortened,
    step_axis,
    style_class,
    text_width,
)
from studies.report.formats import percent
from studies.report.groups import Measure, Standing

_LABEL, _SMALL = 13.0, 12.5  # font sizes of the style sheet


@dataclass(frozen=True)
class Figure:
    """A figure at any width. `name` is that of its section; `description` is for screen readers."""

    name: str
    title: str
    caption: str
    description: str

    def draw(self, width: float, name: str = "") -> Drawing:
        """The drawing, `width` CSS pixels wide; `name` must be unique on the page."""
        raise NotImplementedError


class Chart:
    """Axes that are drawn, with their grid; points are pairs of values."""

    def __init__(self, drawing: Drawing, x: Axis, y: Axis) -> None:
        self.drawing, self.x, self.y = drawing, x, y
        for tick in x.ticks:
            drawing.line([(x(tick), y.end), (x(tick), y.start)], "grid" if tick else "zero")
            drawing.text((x(tick), y.start + 18), x.words(tick) if tick else "0", "tick", "middle")
        for tick in y.ticks:
            drawing.line([(x.start, y(tick)), (x.end, y(tick))], "grid" if tick else "zero")
            drawing.text((x.start - 8, y(tick) + 4), y.words(tick) if tick else "0", "tick", "end")

    def at(self, point: Point) -> Point:
        return self.x(point[0]), self.y(point[1])

    def line(self, points: Iterable[Point], kind: str) -> None:
        self.drawing.line([self.at(point) for point in points], kind)


class Mark(NamedTuple):
    """A mark of a plane; `kind` is "mark", or "run" for a small one."""

    place: Standing
    style: int
    tooltip: str
    kind: str = "mark"


@dataclass(frozen=True)
class Plane(Figure):
    """The plane of learning (to the right) against forgetting (upwards).

    `lines` are of a style class each; `labels` name places.
    """

    measure: Measure
    lines: Sequence[tuple[str, Sequence[Standing]]]
    marks: Sequence[Mark]
    labels: Sequence[tuple[str, Standing]]

    def draw(self, width: float, name: str = "") -> Drawing:
        height = min(560.0, max(380.0, 0.66 * width))
        drawing = Drawing(width, height, name or self.name, self.title, self.description)
        measure, bottom = self.measure, drawing.height - 58.0
        right = drawing.width - min(
            max(text_width(name, _LABEL) for name, _ in self.labels), 0.13 * drawing.width
        )
        places = [
            *(place for _, line in self.lines for place in line),
            *(mark.place for mark in self.marks),
        ]
        across, up = ([sign * measure.better * size for size in measure.rounds] for sign in (1, -1))
        x = padded_axis([0.0, *(place.learned for place in places)], 68.0, right, measure.on_new)
        y = padded_axis(
            [0.0, *(place.forgotten for place in places)], bottom, 34.0, measure.on_kept
        )
        chart = Chart(drawing, x.with_ticks(across), y.with_ticks(up))
        drawing.text((right - 4, bottom - 6), "better \N{SOUTH EAST ARROW}", "hint", "end")
        drawing.text(
            (0, 14), f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {measure.kept}", "axis"
        )
        where = f"learned: {measure.noun}, {measure.new} \N{RIGHTWARDS ARROW}"
        drawing.text((right, bottom + 42), where, "axis", "end")
        for kind, line in self.lines:
            chart.line(line, kind)
        for mark in self.marks:
            drawing.mark(
                chart.at(mark.place),
                mark.style,
                mark.kind,
                0.5 if mark.kind == "run" else 1.0,
                mark.tooltip,
            )
        self._name(chart)
        return drawing

    def _name(self, chart: Chart) -> None:
        """Marks the base, and labels places that have room, with a leader line where the label is further away."""
        drawing, x, y = chart.drawing, chart.x, chart.y
        points = [(x(0), y(0)), *(chart.at(place) for _, place in self.labels)]
        drawing.mark(points[0], 0, "base")
        names = ["base", *(shortened(name, _LABEL, 0.4 * drawing.width) for name, _ in self.labels)]
        room = Box(x.start, y.end - 8, drawing.width, y.start)
        hint = Box(x.end - 64, y.start - 20, x.end, y.start)
        taken = [hint, *(around(point, 12) for point in points[1:])]
        boxes = place_labels(
            points, [text_width(name, _LABEL) for name in names], _LABEL + 3, taken, room
        )
        for name, point, box in zip(names, points, boxes, strict=True):
            if box is None:
                continue
            near = (min(max(point[0], box.left - 2), box.right + 2), (box.top + box.bottom) / 2)
            if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 22:
                drawing.line([point, near], "leader")
            drawing.text((box.left, box.bottom - 4), name, "label")


class Series(NamedTuple):
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


class Panel(NamedTuple):
    """Lines over steps. The y axis is logarithmic, or of shares from 0 to 1."""

    heading: str
    series: Sequence[Series]
    is_logarithmic: bool = False

    def draw(self, drawing: Drawing, left: float, top: float, right: float, bottom: float) -> None:
        steps, values = zip(
            *(point for own in self.series for line in own.lines for point in line), strict=True
        )
        start, end = bottom - 66, top + 36
        drawing.text((left, top + 14), self.heading, "axis")
        room = min(max(text_width(own.label, _SMALL) for own in self.series), 0.36 * (right - left))
        x = step_axis(max(steps), left + 52, right - room - 22)
        if self.is_logarithmic:
            y = log_axis(values, start, end)
        else:
            y = Axis(0, 1, start, end, percent, (0, 0.2, 0.4, 0.6, 0.8, 1))
        chart = Chart(drawing, x, y)
        drawing.line([(x.start, y.start), (x.end, y.start)], "zero")
        drawing.text(((x.start + x.end) / 2, y.start + 37), "steps", "tick", "middle")
        for own in self.series:
            for line in own.lines if len(own.lines) > 1 else ():
                chart.line(line, f"way {style_class(own.style)}")
        # The name of each line is at its end, and names are moved apart where ends are close.
        heights = moved_apart([y(own.middle[-1][1]) for own in self.series], 16, y.end, y.start)
        for own, height in zip(self.series, heights, strict=True):
            chart.line(own.middle, f"line {style_class(own.style)}")
            across, up = chart.at(own.middle[-1])
            drawing.mark((across, up), own.style, size=0.8)
            drawing.line([(across + 6, up), (x.end + 14, height)], "leader")
            drawing.text(
                (x.end + 17, height + 4), shortened(own.label, _SMALL, room), "label small"
            )


@dataclass(frozen=True)
class Panels(Figure):
    """Panels, two in a row where it is wide enough."""

    panels: Sequence[Panel]

    def draw(self, width: float, name: str = "") -> Drawing:
        columns = 2 if width >= 600 and len(self.panels) > 1 else 1
        high = max(300.0, *(102.0 + 16 * len(panel.series) for panel in self.panels))
        height = high * math.ceil(len(self.panels) / columns)
        drawing = Drawing(width, height, name or self.name, self.title, self.description)
        wide = width / columns
        for index, panel in enumerate(self.panels):
            row, column = divmod(index, columns)
            gap = 18 if column + 1 < columns else 0
            panel.draw(
                drawing, column * wide, row * high, (column + 1) * wide - gap, (row + 1) * high
            )
        return drawing
