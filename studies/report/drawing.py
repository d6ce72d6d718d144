"""Drawings as SVG without colours and fonts, which a style sheet decides: lines, marks, axes, and places for labels.

This is our own code because no plotting library draws figures that need no script, follow a dark or light page, fit a
phone and print well. Sizes are in CSS pixels; templates/svg.html writes the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from studies.report.formats import count, power_of_ten

Point = tuple[float, float]
Words = Callable[[float], str]
Warp = Callable[[float], float]


class Drawing:
    """The parts of an SVG element, with all text escaped; `name` makes its ids unique on a page.

    Without a title it is decoration, which screen readers skip.
    """

    def __init__(
        self, width: float, height: float, name: str = "", title: str = "", description: str = ""
    ) -> None:
        self.width, self.height = width, height
        self.name, self.title, self.description = name, title, description
        self.parts: list[Markup] = []

    def _add(self, template: str, *values: object) -> None:
        self.parts.append(Markup(template).format(*values))

    def line(self, points: Sequence[Point], kind: str) -> None:
        """A line of the style class `kind` through `points`; nothing where there are fewer than two."""
        if len(points) > 1:
            self._add(
                '<path class="{}" d="M{}"/>', kind, "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            )

    def text(self, at: Point, text: str, kind: str, anchor: str = "start") -> None:
        """A text with the start, middle or end of its baseline at a point."""
        self._add(
            '<text class="{}" text-anchor="{}" x="{:.1f}" y="{:.1f}">{}</text>',
            kind,
            anchor,
            *at,
            text,
        )

    def mark(
        self, at: Point, style: int, kind: str = "mark", size: float = 1.0, tooltip: str = ""
    ) -> None:
        """The mark of a style, which has its own shape and colour."""
        shape = _SHAPES[(style + style // len(_SHAPES)) % len(_SHAPES)]
        points = " ".join(f"{at[0] + size * x:.1f},{at[1] + size * y:.1f}" for x, y in shape)
        title = Markup("<title>{}</title>").format(tooltip) if tooltip else ""
        self._add(
            '<polygon class="{} {}" points="{}">{}</polygon>',
            kind,
            style_class(style),
            points,
            title,
        )


def style_class(style: int) -> str:
    """The style class that gives the colour of the `style`-th group."""
    return f"style-{style % len(_SHAPES)}"


def text_width(text: str, size: float) -> float:
    """An estimate of the width of a text; the reader's fonts are not known."""
    return size * sum(1.0 if ord(letter) > 0x1100 else 0.58 for letter in text)


def shortened(text: str, size: float, width: float) -> str:
    """`text`, cut to about `width` with an ellipsis where it is longer."""
    most = int(len(text) * width / max(width, text_width(text, size)))
    return text if most == len(text) else f"{text[: most - 1].rstrip()}\N{HORIZONTAL ELLIPSIS}"


def _polygon(corners: int, turn: float, radius: float) -> list[Point]:
    angles = (2 * math.pi * corner / corners + turn for corner in range(corners))
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


# Corners, turn (1: half a circle) and radius; so that all look about equally large.
_MARKS = (
    (24, 0, 5.2),
    (4, 0.25, 6.5),
    (3, 0, 7.0),
    (4, 0, 7.0),
    (3, 1, 7.0),
    (3, 0.5, 7.0),
    (6, 0, 5.7),
)
_SHAPES = [_polygon(corners, turn * math.pi, radius) for corners, turn, radius in _MARKS]

# --- Axes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels from `start` to `end`; `ticks` are labelled by `words`.

    `warp` is the scale's function, such as a logarithm; `low` and `high` are its results at the ends.
    """

    low: float
    high: float
    start: float
    end: float
    words: Words
    ticks: Sequence[float] = ()
    warp: Warp = float

    def __call__(self, value: float) -> float:
        return self.start + (self.warp(value) - self.low) / (self.high - self.low) * (
            self.end - self.start
        )

    def with_ticks(self, rounds: Iterable[float]) -> Axis:
        """The axis with those of `rounds` as ticks, in their order, for whose labels there is room."""
        gap = 76 if self.start < self.end else 28
        ticks: list[float] = []
        for tick in rounds:
            if self.low <= self.warp(tick) <= self.high and all(
                abs(self(tick) - self(one)) >= gap for one in ticks
            ):
                ticks.append(tick)
        return replace(self, ticks=sorted(ticks))


def padded_axis(
    values: Sequence[float], start: float, end: float, words: Words, warp: Warp = float
) -> Axis:
    """An axis over `values`, without ticks."""
    low, high = min(map(warp, values)), max(map(warp, values))
    room = 0.07 * (high - low) if high - low > 1e-4 else 0.05
    return Axis(low - room, high + room, start, end, words, warp=warp)


def step_axis(last: float, start: float, end: float) -> Axis:
    """An axis of steps from 0 to `last`."""
    axis = Axis(0.0, max(1.0, last), start, end, count)
    return axis.with_ticks(
        tick for tick in _multiples(0.0, axis.high, (end - start) / 80) if tick == int(tick)
    )


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis over `values`, all above 0."""
    axis = padded_axis(
        values,
        start,
        end,
        lambda value: f"{value:,.6g}" if value < 1e6 else power_of_ten(value, 3),
        math.log10,
    )
    if axis.high - axis.low < 0.7:
        return axis.with_ticks(_multiples(10**axis.low, 10**axis.high, 6))
    decades = range(
        math.floor(axis.low), min(math.ceil(axis.high), 307) + 1
    )  # 5e307 is still a float
    return axis.with_ticks(10.0**decade * step for step in (1, 3, 2, 5) for decade in decades)


def _multiples(low: float, high: float, most: float) -> list[float]:
    """About `most` multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [
        apart * number for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)
    ]


# --- Places for labels ------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)


def around(point: Point, half: float) -> Box:
    return Box(point[0] - half, point[1] - half, point[0] + half, point[1] + half)


# From a mark to its label: distances in pixels and directions, in order of preference.
_DISTANCES = (11.0, 20.0, 32.0, 46.0, 64.0)
_DIRECTIONS = (
    (1.0, 0.0),
    (-1.0, 0.0),
    (0.8, -0.8),
    (0.8, 0.8),
    (-0.8, -0.8),
    (-0.8, 0.8),
    (0.0, -1.0),
    (0.0, 1.0),
)


def place_labels(
    points: Sequence[Point], widths: Sequence[float], height: float, taken: Sequence[Box], room: Box
) -> list[Box | None]:
    """A box for each point's label: near it, within `room`, and if possible not over `taken`.

    None where it would cover the label of an earlier point.
    """
    boxes: list[Box | None] = []
    marks = [around(point, 8) for point in points]
    for (x, y), width in zip(points, widths, strict=True):
        labels = [box for box in boxes if box is not None]
        obstacles, choices = [*taken, *marks, *labels], []
        for reach in _DISTANCES:
            for order, (right, down) in enumerate(_DIRECTIONS):
                # The distance is to the label's nearest side, or to its middle above and below the mark.
                left = x + reach * right - (0.0 if right > 0 else width if right < 0 else width / 2)
                top = y + reach * down - height / 2
                box = Box(left, top, left + width, top + height)
                outside = width * height - box.overlap(room)
                covered = sum(box.overlap(other) for other in obstacles)
                choices.append((reach + order + 4 * outside + covered, box))
        best = min(choices)[1]
        boxes.append(None if any(best.overlap(label) > 1 for label in labels) else best)
    return boxes


def moved_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions close to `places`, at least `gap` apart, from `low` to `high` if they fit there."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    edge = low
    for index in order:
        edge = found[index] = max(found[index], edge)
        edge += gap
    edge = high
    for index in reversed(order):
        edge = found[index] = min(found[index], edge)
        edge -= gap
    return found
