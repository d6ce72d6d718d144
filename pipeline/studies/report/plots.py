"""Two kinds of plots: the plane of learning against forgetting, and panels of lines over steps or layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.run_folder.metrics import mean
from pipeline.studies.report.drawing import (
    Axis,
    Box,
    Drawing,
    MakeAxis,
    Point,
    around,
    distance_axis,
    linear_axis,
    moved_apart,
    place_labels,
    shortened,
    style_class,
    text_width,
)
from pipeline.studies.report.runs import Measure, Standing
from pipeline.studies.report.words import count, short

_LABEL, _SMALL = 13.0, 12.5  # font sizes of the style sheet


@dataclass(frozen=True)
class Figure:
    """A figure at any width. `name` is that of its section; `description` is for screen readers."""

    name: str
    title: str
    caption: str
    description: str
    height: Callable[[float], float]
    fill: Callable[[Drawing], None]

    def draw(self, width: float, name: str = "") -> Drawing:
        """The drawing, `width` CSS pixels wide; `name` must be unique on the page."""
        drawing = Drawing(width, self.height(width), name or self.name, self.title, self.description)
        self.fill(drawing)
        return drawing


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
        """The pixel of a point."""
        return self.x(point[0]), self.y(point[1])

    def line(self, points: Iterable[Point], kind: str) -> None:
        """A line through points, in their order."""
        self.drawing.line([self.at(point) for point in points], kind)


class Plane(Chart):
    """A chart of standings: learned to the right, forgotten upwards.

    There is room for `places`, and at the right for `labels`; `learned` and `kept` name the corpora.
    """

    def __init__(
        self,
        drawing: Drawing,
        places: Sequence[Standing],
        labels: Iterable[str],
        measure: Measure,
        learned: str,
        kept: str,
    ) -> None:
        right = drawing.width - min(max(text_width(label, _LABEL) for label in labels), 0.13 * drawing.width)
        bottom = drawing.height - 58.0
        across, up = ([sign * measure.better * size for size in measure.rounds] for sign in (1, -1))
        x = distance_axis([place.learned for place in places], 68.0, right, measure.on_new, across)
        y = distance_axis([place.forgotten for place in places], bottom, 34.0, measure.on_kept, up)
        super().__init__(drawing, x, y)
        drawing.text((right - 4, bottom - 6), "better \N{SOUTH EAST ARROW}", "hint", "end")
        drawing.text((0, 14), f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {kept}", "axis")
        drawing.text((right, bottom + 42), f"learned: {measure.noun}, {learned} \N{RIGHTWARDS ARROW}", "axis", "end")

    def name(self, named: Sequence[tuple[str, Standing]]) -> None:
        """Marks the base, and labels every point, with a leader line where the label is further away."""
        drawing, x, y = self.drawing, self.x, self.y
        points = [(x(0), y(0)), *(self.at(place) for _, place in named)]
        drawing.mark(points[0], 0, "base")
        names = ["base", *(shortened(name, _LABEL, 0.4 * drawing.width) for name, _ in named)]
        room = Box(x.start, y.end - 8, drawing.width, y.start)
        hint = Box(x.end - 64, y.start - 20, x.end, y.start)
        taken = [hint, *(around(point, 12) for point in points[1:])]
        boxes = place_labels(points, [text_width(name, _LABEL) for name in names], _LABEL + 3, taken, room)
        for name, point, box in zip(names, points, boxes, strict=True):
            near = (min(max(point[0], box.left - 2), box.right + 2), (box.top + box.bottom) / 2)
            if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 22:
                drawing.line([point, near], "leader")
            drawing.text((box.left, box.bottom - 4), name, "label")


def plane_height(width: float) -> float:
    """The height of a figure with a plane."""
    return min(560.0, max(380.0, 0.66 * width))


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
    """A chart over steps: its heading, its lines, and how its y axis is made."""

    heading: str
    series: Sequence[Series]
    y_axis: MakeAxis

    @property
    def height(self) -> float:
        return max(300.0, 102 + 16 * len(self.series))

    def draw(self, drawing: Drawing, left: float, right: float, top: float) -> None:
        """Draws the panel from these pixels on."""
        points = [point for own in self.series for line in own.lines for point in _finite(line)]
        drawing.text((left, top + 14), self.heading if points else f"{self.heading}: no finite figure", "axis")
        if not points:
            return
        room = min(max(text_width(own.label, _SMALL) for own in self.series), 0.36 * (right - left))
        x = linear_axis([0.0, *(at for at, _ in points)], left + 52, right - room - 22, count, least=1.0)
        y = self.y_axis([value for _, value in points], top + self.height - 66, top + 36)
        chart = Chart(drawing, x, y)
        drawing.line([(x.start, y.start), (x.end, y.start)], "zero")
        drawing.text(((x.start + x.end) / 2, y.start + 37), "steps", "tick", "middle")
        for own in self.series:
            for line in own.lines if len(own.lines) > 1 else ():
                chart.line(_finite(line), f"way {style_class(own.style)}")
        ends = [(own, middle) for own in self.series if (middle := _finite(own.middle))]
        # The name of each line is at its end, and names are moved apart where ends are close.
        heights = moved_apart([y(middle[-1][1]) for _, middle in ends], 16, y.end, y.start)
        for (own, middle), height in zip(ends, heights, strict=True):
            chart.line(middle, f"line {style_class(own.style)}")
            across, up = chart.at(middle[-1])
            drawing.mark((across, up), own.style, size=0.8)
            drawing.line([(across + 6, up), (x.end + 14, height)], "leader")
            drawing.text((x.end + 17, height + 4), shortened(own.label, _SMALL, room), "label small")


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def panels_figure(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Figure | None:
    """A figure of panels, two in a row where it is wide enough; None where no panel has a line."""
    panels = [panel for panel in panels if panel.series]
    if not panels:
        return None

    def rows(width: float) -> list[Sequence[Panel]]:
        columns = 2 if width >= 600 and len(panels) > 1 else 1
        return [panels[at : at + columns] for at in range(0, len(panels), columns)]

    def height(row: Sequence[Panel]) -> float:
        return max(panel.height for panel in row)

    def fill(drawing: Drawing) -> None:
        top, shown = 0.0, rows(drawing.width)
        wide = drawing.width / len(shown[0])
        for row in shown:
            for column, panel in enumerate(row):
                panel.draw(drawing, column * wide, (column + 1) * wide - 18 * (column + 1 < len(shown[0])), top)
            top += height(row)

    several = any(len(own.lines) > 1 for panel in panels for own in panel.series)
    ends = [
        f"{panel.heading}: "
        + ", ".join(f"{own.label} {short(own.middle[-1][1])}" for own in panel.series if own.middle)
        for panel in panels
    ]
    return Figure(
        name,
        title,
        caption + (" Means over seeds, thin lines single runs." if several else ""),
        f"At the end of each line. {'; '.join(ends)}",
        lambda width: sum(map(height, rows(width))),
        fill,
    )
