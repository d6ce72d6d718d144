"""A figure of matplotlib that is measured in CSS pixels, and its axes and ticks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from pipeline.extensions.report.figures.labels import Point
from pipeline.extensions.report.figures.style import (
    FAINT,
    INK,
    PAPER,
    SOFT,
    TICK_SIZE,
    color_of,
    marker_of,
)
from pipeline.extensions.report.formats import count, power_of_ten

# matplotlib counts in points, of which SVG has 72 an inch: at 72 dpi a point is a pixel, and a unit
# of the SVG's coordinates.
_DPI = 72
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Drawing:
    """A figure, in CSS pixels from the top left corner.

    Groups of its SVG have a class and may have a tooltip: see `tagged`.

    Attributes:
        name: makes the SVG's ids unique on a page.
        title: for screen readers, as `description`; without a title the figure is decoration.
    """

    def __init__(
        self, width: float, height: float, name: str, title: str = "", description: str = ""
    ) -> None:
        self.width = width
        self.height = height
        self.name = name
        self.title = printable(title)
        self.description = printable(description)
        self.figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        self.figure.patch.set_visible(False)

    def add_axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes with a grid and without a frame, between these edges."""
        axes = self.figure.add_axes(
            (
                left / self.width,
                1 - bottom / self.height,
                (right - left) / self.width,
                (bottom - top) / self.height,
            )
        )
        axes.patch.set_visible(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0, pad=8, labelsize=TICK_SIZE, labelcolor=SOFT)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        return axes

    def position(self, axes: Axes, point: Point) -> Point:
        """Where a point of the axes, whose limits are set, lies in the figure."""
        x, y = axes.transData.transform(point)
        # matplotlib counts from the bottom.
        return float(x), self.height - float(y)

    def text(
        self,
        at: Point,
        text: str,
        size: float,
        *,
        kind: str = "text",
        color: str = INK,
        align: str = "left",
        weight: int = 400,
        style: str = "normal",
    ) -> None:
        """A text whose baseline starts, has its middle, or ends at a point, by `align`."""
        x, y = at
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            printable(text),
            size=size,
            color=color,
            horizontalalignment=align,
            verticalalignment="baseline",
            weight=weight,
            style=style,
            # A label may have dollar signs, between which matplotlib would set mathematics.
            parse_math=False,
            gid=tagged(kind),
        )

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """A line through points of the figure, above all axes."""
        places = np.array(points)
        line = Line2D(
            places[:, 0] / self.width,
            1 - places[:, 1] / self.height,
            color=color,
            linewidth=width,
            transform=self.figure.transFigure,
        )
        self.figure.add_artist(line)

    def mark(self, at: Point, style: int, *, size: float = 1.0, tooltip: str = "") -> None:
        """The mark of a style at a point of the figure."""
        x, y = at
        line = mark(style, size=size, tooltip=tooltip)
        line.set_data([x / self.width], [1 - y / self.height])
        line.set_transform(self.figure.transFigure)
        self.figure.add_artist(line)


def mark(
    style: int, *, kind: str = "mark", size: float = 1.0, opacity: float = 1.0, tooltip: str = ""
) -> Line2D:
    """The mark of a style, which has its own shape and colour, at the origin of the axes."""
    shape, pixels = marker_of(style)
    line = Line2D(
        [0],
        [0],
        linestyle="none",
        marker=shape,
        markersize=size * pixels,
        markerfacecolor=color_of(style),
        markeredgecolor="none",
        markeredgewidth=0.0,
        alpha=opacity,
        clip_on=False,
        zorder=3,
        gid=tagged(kind, tooltip),
    )
    if kind == "mark":
        # Above the small marks of runs, and apart from them by an edge of the page's colour.
        line.set(markeredgecolor=PAPER, markeredgewidth=1.2, zorder=4)
    return line


def tagged(kind: str, tooltip: str = "") -> str:
    """The gid of an artist whose group in the SVG has the class `kind`, and this tooltip."""
    return f"{kind}|{printable(tooltip)}"


def printable(text: str) -> str:
    """`text` with replacement characters for those that XML cannot contain, in one line."""
    return " ".join(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text).split())


# --- Axes -----------------------------------------------------------------------------------------


def padded(low: float, high: float) -> tuple[float, float]:
    """Limits a little outside `low` and `high`."""
    if high - low > 1e-4:
        padding = 0.07 * (high - low)
    else:
        padding = 0.05
    return low - padding, high + padding


def fitting_ticks(rounds: Iterable[float], limits: tuple[float, float], gap: float) -> list[float]:
    """Those of `rounds` between the limits that are at least `gap` apart, the first preferred."""
    low, high = limits
    ticks: list[float] = []
    for tick in rounds:
        is_apart = all(abs(tick - other) >= gap for other in ticks)
        if low <= tick <= high and is_apart:
            ticks.append(tick)
    return sorted(ticks)


def set_ticks(axis: Axis, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Exactly these ticks on `axes.xaxis` or `axes.yaxis`."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FixedFormatter(list(labels)))


def set_step_axis(axes: Axes, last: float, width: float) -> None:
    """An x axis of `width` pixels over the steps from 0 to `last`."""
    axes.set_xlim(0.0, max(1.0, last))
    # A label of steps takes up to 80 pixels.
    most = max(1, int(width / 80))
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: count(step)))


def set_linear_axis(axes: Axes, values: Sequence[float], words: Callable[[float], str]) -> None:
    """A y axis around `values`, however small they are; `words` writes its ticks."""
    low = min(values)
    high = max(values)
    # Of a single value, so much that it has its own tick in the middle.
    padding = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_ylim(low - padding, high + padding)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))


def set_log_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis over `values`, all above 0."""
    low, high = padded(math.log10(min(values)), math.log10(max(values)))
    axes.set_yscale("log")
    # 10^308 is still a float, and 10^-307 has all its digits.
    axes.set_ylim(10 ** max(low, -307.0), 10 ** min(high, 308.0))
    if high - low < 0.7:
        # Within a factor of 5 there may be no tick of the logarithmic kind.
        axes.yaxis.set_major_locator(MaxNLocator(6))
    else:
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: log_tick(value)))


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between 10^low and 10^high, at most nine; of few decades also 2 and 5 times.

    matplotlib's LogLocator overflows near the largest float.
    """
    apart = max(1, math.ceil((high - low) / 8))
    factors = (1.0, 2.0, 5.0) if high - low < 2.5 else (1.0,)
    ticks: list[float] = []
    for power in range(math.floor(low), min(math.floor(high), 307) + 1, apart):
        for factor in factors:
            ticks.append(factor * 10.0**power)
    return [tick for tick in ticks if low <= math.log10(tick) <= high]


def log_tick(value: float) -> str:
    """The label of a tick of a logarithmic axis: 1,500, 0.02, 3·10⁸."""
    if value < 1e6:
        return f"{value:,.6g}"
    return power_of_ten(value, 3)
