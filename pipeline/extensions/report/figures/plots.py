"""A plot of any width, and plots of lines over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from pipeline.extensions.report.figures.drawing import (
    Drawing,
    set_linear_axis,
    set_log_axis,
    set_step_axis,
    tagged,
)
from pipeline.extensions.report.figures.labels import (
    Box,
    Point,
    moved_apart,
    text_width,
    wrapped,
)
from pipeline.extensions.report.figures.style import (
    AXIS_SIZE,
    LINE_LABEL_SIZE,
    SOFT,
    TICK_SIZE,
    color_of,
)
from pipeline.extensions.report.formats import percent
from pipeline.run_folder.metrics import mean

# Line widths and opacities by kind.
_LINES = {"course": (1.0, 0.4), "rates": (1.6, 0.7), "spread": (1.6, 1.0), "mean": (2.0, 1.0)}
_LABEL_SHARE = 0.36
"""The share of a panel's width that the names of lines may have."""
_LINE_HEIGHT = 15.0
"""Of a name of several lines, in pixels."""


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


class Series(NamedTuple):
    """The lines of one group: each has the points of a run, sorted by x.

    Attributes:
        smoothed: drawn in place of the mean, over thin lines; empty: the mean of the lines.
    """

    label: str
    style: int
    lines: Sequence[Sequence[Point]]
    smoothed: Sequence[Point] = ()

    @property
    def has_thin_lines(self) -> bool:
        """Whether the lines are drawn, and not their mean alone: of one line it is the mean."""
        return len(self.lines) > 1 or bool(self.smoothed)

    @property
    def mean_line(self) -> list[Point]:
        """The mean over the runs, at the steps where all of them have a point."""
        if self.smoothed:
            return list(self.smoothed)
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


class Level(NamedTuple):
    """A value to compare lines with: a dashed line across the panel, with its name."""

    label: str
    value: float


class _Name(NamedTuple):
    """The name at the end of a line, and where that end is."""

    text: str
    end: Point
    style: int | None


class Panel(NamedTuple):
    """Lines over steps.

    Attributes:
        axis: what the y axis shows: values on a logarithmic or a linear scale, or shares from 0 to
            1.
        words: the ticks of a linear axis.
        levels: values to compare the lines with.
        boundaries: the steps behind which another stage of training begins.
    """

    heading: str
    series: Sequence[Series]
    axis: Literal["logarithmic", "linear", "shares"] = "shares"
    words: Callable[[float], str] = "{:g}".format
    levels: Sequence[Level] = ()
    boundaries: Sequence[float] = ()

    @property
    def label_width(self) -> float:
        """The width of the longest name of a line, in pixels."""
        labels = [*(own.label for own in self.series), *(level.label for level in self.levels)]
        return max(text_width(label, LINE_LABEL_SIZE) for label in labels)

    def label_lines(self, width: float) -> int:
        """The most lines of a name where the panel is `width` pixels wide."""
        room = min(self.label_width, _LABEL_SHARE * width)
        labels = [*(own.label for own in self.series), *(level.label for level in self.levels)]
        return max(len(wrapped(label, LINE_LABEL_SIZE, room)) for label in labels)

    def height(self, width: float) -> float:
        """Enough for the names at the ends of all lines."""
        names = len(self.series) + len(self.levels)
        return max(300.0, 102.0 + names * (_LINE_HEIGHT * self.label_lines(width) + 1))

    def draw(self, drawing: Drawing, left: float, top: float, right: float, bottom: float) -> None:
        """Draws the panel between these edges of `drawing`."""
        drawing.text((left, top + 14), self.heading, AXIS_SIZE, weight=600)
        label_width = min(self.label_width, _LABEL_SHARE * (right - left))
        area = Box(left + 52, top + 36, right - label_width - 22, bottom - 66)
        axes = drawing.add_axes(area.left, area.top, area.right, area.bottom)
        self._set_axes(axes, area)
        middle = (area.left + area.right) / 2
        drawing.text((middle, area.bottom + 37), "steps", TICK_SIZE, color=SOFT, align="center")

        for step in self.boundaries:
            axes.axvline(step, color=SOFT, linewidth=1.0, linestyle=":", zorder=1)
        for level in self.levels:
            axes.axhline(level.value, color=SOFT, linewidth=1.2, linestyle="--", zorder=1)
        for own in self.series:
            if own.has_thin_lines:
                for line in own.lines:
                    draw_line(axes, "course", own.style, line)
        self._draw_means(drawing, axes, area, label_width)

    def _set_axes(self, axes: Axes, area: Box) -> None:
        steps: list[float] = list(self.boundaries)
        values: list[float] = [level.value for level in self.levels]
        for own in self.series:
            for line in own.lines:
                for step, value in line:
                    steps.append(step)
                    values.append(value)
        set_step_axis(axes, max(steps), area.right - area.left)
        if self.axis == "logarithmic":
            set_log_axis(axes, values)
        elif self.axis == "linear":
            set_linear_axis(axes, values, self.words)
        else:
            axes.set_ylim(0.0, 1.0)
            axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share)))
        axes.spines["bottom"].set(visible=True, color=SOFT, linewidth=1.0)

    def _draw_means(self, drawing: Drawing, axes: Axes, area: Box, label_width: float) -> None:
        """Each group's mean, with its name at its end; names of close ends are moved apart."""
        names: list[_Name] = []
        for own in self.series:
            points = own.mean_line
            draw_line(axes, "mean", own.style, points)
            names.append(_Name(own.label, drawing.position(axes, points[-1]), own.style))
        last_step = axes.get_xlim()[1]
        for level in self.levels:
            end = drawing.position(axes, (last_step, level.value))
            names.append(_Name(level.label, end, None))

        gap = _LINE_HEIGHT * self.label_lines(label_width / _LABEL_SHARE) + 1
        heights = moved_apart([name.end[1] for name in names], gap, area.top, area.bottom)
        for name, height in zip(names, heights, strict=True):
            x, y = name.end
            if name.style is not None:
                drawing.mark(name.end, name.style, size=0.8)
                x += 6
            drawing.line([(x, y), (area.right + 14, height)], SOFT, 0.6)
            lines = wrapped(name.text, LINE_LABEL_SIZE, label_width)
            first = height + 4 - _LINE_HEIGHT * (len(lines) - 1) / 2
            for number, line in enumerate(lines):
                drawing.text(
                    (area.right + 17, first + _LINE_HEIGHT * number),
                    line,
                    LINE_LABEL_SIZE,
                    kind="label",
                    weight=500,
                )


@dataclass(frozen=True)
class StepsPlot(Plot):
    """Panels over steps, two in a row where it is wide enough for the names of the lines."""

    panels: Sequence[Panel]

    def draw(self, width: float, name: str = "") -> Drawing:
        columns = self._columns(width)
        panel_width = width / columns
        gap = 18 if columns > 1 else 0
        panel_height = max(panel.height(panel_width - gap) for panel in self.panels)
        height = panel_height * math.ceil(len(self.panels) / columns)
        drawing = Drawing(width, height, name or self.name, self.title, self.description)
        for index, panel in enumerate(self.panels):
            row, column = divmod(index, columns)
            panel.draw(
                drawing,
                left=column * panel_width,
                top=row * panel_height,
                right=(column + 1) * panel_width - (gap if column + 1 < columns else 0),
                bottom=(row + 1) * panel_height,
            )
        return drawing

    def _columns(self, width: float) -> int:
        """One where there is one panel, or names would leave half a row too little room."""
        if width < 600 or len(self.panels) == 1:
            return 1
        longest = max(panel.label_width for panel in self.panels)
        return 2 if longest <= _LABEL_SHARE * width / 2 else 1


def draw_line(axes: Axes, kind: str, style: int, points: Sequence[Point]) -> None:
    """A line in the width and opacity of its kind."""
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
