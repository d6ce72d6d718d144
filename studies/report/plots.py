"""Two kinds of plots: learning against forgetting, and lines over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter

from pipeline.run_folder.metrics import mean
from studies.report.drawing import (
    Drawing,
    fitting_ticks,
    mark,
    padded,
    set_log_axis,
    set_step_axis,
    set_ticks,
    tagged,
)
from studies.report.formats import percent
from studies.report.groups import Measure, Standing
from studies.report.labels import (
    Box,
    Point,
    box_around,
    moved_apart,
    place_labels,
    shortened,
    text_width,
)
from studies.report.style import (
    AXIS_SIZE,
    INK,
    LABEL_SIZE,
    LINE_LABEL_SIZE,
    PAPER,
    SOFT,
    TICK_SIZE,
    color_of,
)

# Line widths and opacities of `Line.kind`.
_LINES = {"course": (1.0, 0.4), "rates": (1.6, 0.7), "spread": (1.6, 1.0), "mean": (2.0, 1.0)}
_TICK_GAPS = (76.0, 28.0)
"""Pixels between ticks of the x axis and of the y axis."""


@dataclass(frozen=True)
class Plot:
    """A plot of any width.

    Attributes:
        name: of its section of the page, and of its file.
        description: for screen readers.
    """

    name: str
    title: str
    caption: str
    description: str

    def draw(self, width: float, name: str = "") -> Drawing:
        """The drawing, `width` CSS pixels wide; `name` must be unique on the page."""
        raise NotImplementedError


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
            _draw_line(axes, line.kind, line.style, line.places)
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


class Series(NamedTuple):
    """The lines of one group: each has the points of a run, sorted by x."""

    label: str
    style: int
    lines: Sequence[Sequence[Point]]

    @property
    def mean_line(self) -> list[Point]:
        """The mean over the runs, at the steps where all of them have a point."""
        values: dict[float, list[float]] = {}
        for line in self.lines:
            # A run that resumed may have validated a step twice: the later one counts.
            for x, y in dict(line).items():
                values.setdefault(x, []).append(y)
        points: list[Point] = []
        for x in sorted(values):
            if len(values[x]) == len(self.lines):
                points.append((x, mean(values[x])))
        return points


class Panel(NamedTuple):
    """Lines over steps. The y axis is logarithmic, or of shares from 0 to 1."""

    heading: str
    series: Sequence[Series]
    is_logarithmic: bool = False

    def draw(self, drawing: Drawing, left: float, top: float, right: float, bottom: float) -> None:
        """Draws the panel between these edges of `drawing`."""
        drawing.text((left, top + 14), self.heading, AXIS_SIZE, weight=600)
        longest_label = max(text_width(own.label, LINE_LABEL_SIZE) for own in self.series)
        label_width = min(longest_label, 0.36 * (right - left))
        area = Box(left + 52, top + 36, right - label_width - 22, bottom - 66)
        axes = drawing.add_axes(area.left, area.top, area.right, area.bottom)
        self._set_axes(axes, area)
        middle = (area.left + area.right) / 2
        drawing.text((middle, area.bottom + 37), "steps", TICK_SIZE, color=SOFT, align="center")

        for own in self.series:
            # Of a single run its line is the mean.
            if len(own.lines) > 1:
                for line in own.lines:
                    _draw_line(axes, "course", own.style, line)
        self._draw_means(drawing, axes, area, label_width)

    def _set_axes(self, axes: Axes, area: Box) -> None:
        steps: list[float] = []
        values: list[float] = []
        for own in self.series:
            for line in own.lines:
                for step, value in line:
                    steps.append(step)
                    values.append(value)
        set_step_axis(axes, max(steps), area.right - area.left)
        if self.is_logarithmic:
            set_log_axis(axes, values)
        else:
            axes.set_ylim(0.0, 1.0)
            axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share)))
        axes.spines["bottom"].set(visible=True, color=SOFT, linewidth=1.0)

    def _draw_means(self, drawing: Drawing, axes: Axes, area: Box, label_width: float) -> None:
        """Each group's mean, with its name at its end; names of close ends are moved apart."""
        ends = [drawing.position(axes, own.mean_line[-1]) for own in self.series]
        heights = moved_apart([y for _, y in ends], 16, area.top, area.bottom)
        for own, end, height in zip(self.series, ends, heights, strict=True):
            _draw_line(axes, "mean", own.style, own.mean_line)
            drawing.mark(end, own.style, size=0.8)
            x, y = end
            drawing.line([(x + 6, y), (area.right + 14, height)], SOFT, 0.6)
            drawing.text(
                (area.right + 17, height + 4),
                shortened(own.label, LINE_LABEL_SIZE, label_width),
                LINE_LABEL_SIZE,
                kind="label",
                weight=500,
            )


@dataclass(frozen=True)
class StepsPlot(Plot):
    """Panels over steps, two in a row where it is wide enough."""

    panels: Sequence[Panel]

    def draw(self, width: float, name: str = "") -> Drawing:
        columns = 2 if width >= 600 and len(self.panels) > 1 else 1
        # Names at the ends of lines are 16 pixels apart: many of them need a high panel.
        most_lines = max(len(panel.series) for panel in self.panels)
        panel_height = max(300.0, 102.0 + 16 * most_lines)
        panel_width = width / columns
        height = panel_height * math.ceil(len(self.panels) / columns)
        drawing = Drawing(width, height, name or self.name, self.title, self.description)
        for index, panel in enumerate(self.panels):
            row, column = divmod(index, columns)
            gap = 18 if column + 1 < columns else 0
            panel.draw(
                drawing,
                left=column * panel_width,
                top=row * panel_height,
                right=(column + 1) * panel_width - gap,
                bottom=(row + 1) * panel_height,
            )
        return drawing


def _set_change_ticks(axis: Axis, ticks: Sequence[float], words: Callable[[float], str]) -> None:
    labels: list[str] = []
    for tick in ticks:
        labels.append(words(tick) if tick else "0")
    set_ticks(axis, ticks, labels)


def _draw_line(axes: Axes, kind: str, style: int, points: Sequence[Point]) -> None:
    width, opacity = _LINES[kind]
    # Of no points the array would have one dimension.
    line = np.array(points, dtype=float).reshape(-1, 2)
    axes.plot(
        line[:, 0],
        line[:, 1],
        color=color_of(style),
        linewidth=width,
        alpha=opacity,
        gid=tagged(kind),
        zorder=2,
    )


def _draw_mark(axes: Axes, one: Mark) -> None:
    if one.kind == "run":
        line = mark(one.style, kind="run", size=0.5, opacity=0.55, tooltip=one.tooltip)
    else:
        line = mark(one.style, tooltip=one.tooltip)
    line.set_data([one.place.learned], [one.place.forgotten])
    axes.add_line(line)
