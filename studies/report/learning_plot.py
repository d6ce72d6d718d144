"""The plot of a study: what was learned against what was forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis

from pipeline.extensions.report.figures.drawing import (
    Drawing,
    fitting_ticks,
    mark,
    padded,
    set_ticks,
    tagged,
)
from pipeline.extensions.report.figures.labels import (
    Box,
    box_around,
    place_labels,
    shortened,
    text_width,
)
from pipeline.extensions.report.figures.plots import Plot, draw_line
from pipeline.extensions.report.figures.style import (
    AXIS_SIZE,
    INK,
    LABEL_SIZE,
    PAPER,
    SOFT,
)
from studies.report.groups import Measure, Standing

_TICK_GAPS = (76.0, 28.0)
"""Pixels between ticks of the x axis and of the y axis."""


class Line(NamedTuple):
    """A line of a learning plot: a run's course, a spread over seeds, or learning rates."""

    kind: str
    style: int
    places: Sequence[Standing]


class Mark(NamedTuple):
    """A mark of a learning plot: the large one of a method ("mark"), or a run's ("run")."""

    place: Standing
    style: int
    tooltip: str
    kind: str = "mark"


@dataclass(frozen=True)
class LearningPlot(Plot):
    """What was learned, to the right, against what was forgotten, upwards.

    Attributes:
        labels: the names of places; the first get a label for certain, the last where there is
            space.
    """

    measure: Measure
    lines: Sequence[Line]
    marks: Sequence[Mark]
    labels: Sequence[tuple[str, Standing]]

    def draw(self, width: float, name: str = "") -> Drawing:
        # On a phone high enough for labels, and on a desktop low enough to be seen at once.
        height = min(560.0, max(380.0, 0.66 * width))
        drawing = Drawing(width, height, name or self.name, self.title, self.description)
        longest_label = max(text_width(label, LABEL_SIZE) for label, _ in self.labels)
        area = Box(
            left=68.0,
            top=34.0,
            right=width - min(longest_label, 0.13 * width),
            bottom=height - 58.0,
        )
        axes = drawing.add_axes(area.left, area.top, area.right, area.bottom)
        self._set_axes(axes, area)
        for line in self.lines:
            draw_line(axes, line.kind, line.style, line.places)
        for one in self.marks:
            _draw_mark(axes, one)
        self._draw_texts(drawing, area)
        self._draw_labels(drawing, axes, area)
        return drawing

    def _set_axes(self, axes: Axes, area: Box) -> None:
        """Limits around all places and the base, and ticks at round changes."""
        # The base is at the origin.
        learned = [0.0]
        forgotten = [0.0]
        for place in self._places():
            learned.append(place.learned)
            forgotten.append(place.forgotten)

        measure = self.measure
        limits = padded(min(learned), max(learned))
        axes.set_xlim(*limits)
        # What was learned is a change to the better, what was forgotten one to the worse.
        rounds = [measure.better * size for size in measure.rounds]
        gap = _TICK_GAPS[0] * (limits[1] - limits[0]) / (area.right - area.left)
        _set_change_ticks(axes.xaxis, fitting_ticks(rounds, limits, gap), measure.on_new)

        limits = padded(min(forgotten), max(forgotten))
        axes.set_ylim(*limits)
        rounds = [-measure.better * size for size in measure.rounds]
        gap = _TICK_GAPS[1] * (limits[1] - limits[0]) / (area.bottom - area.top)
        _set_change_ticks(axes.yaxis, fitting_ticks(rounds, limits, gap), measure.on_kept)

        axes.axvline(0.0, color=SOFT, linewidth=1.0, zorder=1)
        axes.axhline(0.0, color=SOFT, linewidth=1.0, zorder=1)

    def _places(self) -> list[Standing]:
        """All places that the axes must show."""
        places: list[Standing] = []
        for one in self.marks:
            places.append(one.place)
        for line in self.lines:
            places += line.places
        return places

    def _draw_texts(self, drawing: Drawing, area: Box) -> None:
        measure = self.measure
        up = f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {measure.kept}"
        across = f"learned: {measure.noun}, {measure.new} \N{RIGHTWARDS ARROW}"
        drawing.text((0, 14), up, AXIS_SIZE, weight=600)
        below = (area.right, area.bottom + 42)
        drawing.text(below, across, AXIS_SIZE, weight=600, align="right")
        drawing.text(
            (area.right - 4, area.bottom - 6),
            "better \N{SOUTH EAST ARROW}",
            12.0,
            color=SOFT,
            align="right",
            style="italic",
        )

    def _draw_labels(self, drawing: Drawing, axes: Axes, area: Box) -> None:
        """Marks the base, and labels the places; a leader line goes to a label further away."""
        axes.plot(
            [0.0],
            [0.0],
            marker="o",
            markersize=10.4,
            markerfacecolor=PAPER,
            markeredgecolor=INK,
            markeredgewidth=1.6,
            zorder=5,
            gid=tagged("base"),
        )
        names = ["base"]
        points = [drawing.position(axes, (0.0, 0.0))]
        for name, place in self.labels:
            names.append(shortened(name, LABEL_SIZE, 0.4 * drawing.width))
            points.append(drawing.position(axes, place))

        # Labels may not cover "better", nor the marks of methods.
        hint = Box(area.right - 64, area.bottom - 20, area.right, area.bottom)
        taken = [hint, *(box_around(point, 12) for point in points[1:])]
        widths = [text_width(name, LABEL_SIZE) for name in names]
        within = Box(area.left, area.top - 8, drawing.width, area.bottom)
        boxes = place_labels(points, widths, LABEL_SIZE + 3, taken, within)
        for name, point, box in zip(names, points, boxes, strict=True):
            if box is None:
                continue
            nearest = (
                min(max(point[0], box.left - 2), box.right + 2),
                (box.top + box.bottom) / 2,
            )
            # A label beside its mark is 11 pixels away.
            if abs(nearest[0] - point[0]) + abs(nearest[1] - point[1]) > 22:
                drawing.line([point, nearest], SOFT, 0.6)
            drawing.text((box.left, box.bottom - 4), name, LABEL_SIZE, kind="label", weight=500)


def _set_change_ticks(axis: Axis, ticks: Sequence[float], words: Callable[[float], str]) -> None:
    labels: list[str] = []
    for tick in ticks:
        labels.append(words(tick) if tick else "0")
    set_ticks(axis, ticks, labels)


def _draw_mark(axes: Axes, one: Mark) -> None:
    if one.kind == "run":
        line = mark(one.style, kind="run", size=0.5, opacity=0.55, tooltip=one.tooltip)
    else:
        line = mark(one.style, tooltip=one.tooltip)
    line.set_data([one.place.learned], [one.place.forgotten])
    axes.add_line(line)
