"""Drawings as SVG without colours and fonts, which the page's style sheet decides; and where labels are placed.

This is our own code because no plotting library draws figures that need no script, follow a dark or light page, fit a
phone and print well: docs/adr/0015. Sizes are in CSS pixels. All text is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree as ET

Point = tuple[float, float]
STYLES = 7
_MARK = 5.0  # half the width of a mark
_MARGIN = 18.0  # of a picture in a file of its own
# What XML 1.0 cannot hold, even escaped.
_UNWRITABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Drawing:
    """An SVG element under construction; `name` makes its ids unique on a page.

    Without a title it is decoration, which screen readers skip.
    """

    def __init__(self, name: str, width: float, height: float, title: str = "", description: str = "") -> None:
        self.width, self.height = width, height
        box = f"0 0 {width:g} {height:g}"
        self._root = ET.Element("svg", {"viewBox": box, "class": "figure"})
        if not title:
            self._root.set("aria-hidden", "true")
            return
        self._root.set("role", "img")
        self._root.set("aria-labelledby", f"{name}-title {name}-description")
        ET.SubElement(self._root, "title", {"id": f"{name}-title"}).text = readable(title)
        ET.SubElement(self._root, "desc", {"id": f"{name}-description"}).text = readable(description)

    def line(self, start: Point, end: Point, kind: str) -> None:
        """A straight line of the style class `kind`."""
        (x1, y1), (x2, y2) = start, end
        ET.SubElement(self._root, "line", {"class": kind, **_rounded(x1=x1, y1=y1, x2=x2, y2=y2)})

    def path(self, points: Sequence[Point], kind: str) -> None:
        """A line through `points`; nothing where there are fewer than two."""
        if len(points) > 1:
            way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            ET.SubElement(self._root, "path", {"class": kind, "d": way})

    def text(self, at: Point, text: str, kind: str, anchor: str = "start") -> None:
        """A text with the start, middle or end of its baseline at a point."""
        values = {"class": kind, "text-anchor": anchor, **_rounded(x=at[0], y=at[1])}
        ET.SubElement(self._root, "text", values).text = readable(text)

    def mark(self, at: Point, style: int, kind: str = "mark", *, size: float = 1.0, title: str = "") -> None:
        """The mark of a style, which has its own shape and colour; `title` is its tooltip."""
        shape = (style + style // STYLES) % STYLES
        points = " ".join(f"{at[0] + size * x:.1f},{at[1] + size * y:.1f}" for x, y in _SHAPES[shape])
        element = ET.SubElement(self._root, "polygon", {"class": f"{kind} {style_class(style)}", "points": points})
        if title:
            ET.SubElement(element, "title").text = readable(title)

    def ring(self, at: Point, radius: float, kind: str) -> None:
        """A circle."""
        ET.SubElement(self._root, "circle", {"class": kind, **_rounded(cx=at[0], cy=at[1], r=radius)})

    def markup(self, style_sheet: str | None = None) -> str:
        """The element; with a style sheet, a complete SVG file."""
        if style_sheet is None:
            return ET.tostring(self._root, encoding="unicode")
        size = _rounded(width=self.width + 2 * _MARGIN, height=self.height + 2 * _MARGIN)
        corner = {"x": f"{-_MARGIN:g}", "y": f"{-_MARGIN:g}"}
        box = {"viewBox": f"{-_MARGIN:g} {-_MARGIN:g} {size['width']} {size['height']}"}
        root = ET.Element("svg", {**self._root.attrib, **box, **size, "xmlns": "http://www.w3.org/2000/svg"})
        ET.SubElement(root, "style").text = style_sheet
        ET.SubElement(root, "rect", {"class": "ground", **corner, **size})
        root.extend(self._root)
        return ET.tostring(root, encoding="unicode")


def style_class(style: int) -> str:
    """The style class that gives the colour of the `style`-th group."""
    return f"style-{style % STYLES}"


def text_width(text: str, size: float) -> float:
    """An estimate of the width of a text; the reader's fonts are not known."""
    return size * sum(1.0 if ord(letter) > 0x1100 else 0.58 for letter in text)


def shortened(text: str, size: float, width: float) -> str:
    """`text`, cut to about `width` with an ellipsis where it is longer."""
    if text_width(text, size) <= width:
        return text
    kept = next(end for end in range(len(text), -1, -1) if text_width(text[:end], size) <= width - size or end == 0)
    return f"{text[:kept].rstrip()}\N{HORIZONTAL ELLIPSIS}"


def readable(text: str) -> str:
    """`text` with U+FFFD instead of characters that XML cannot hold."""
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _rounded(**values: float) -> dict[str, str]:
    return {name: f"{value:.1f}" for name, value in values.items()}


def _polygon(corners: int, turn: float, radius: float) -> list[Point]:
    angles = (2 * math.pi * (corner / corners) + turn for corner in range(corners))
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


def _cross() -> list[Point]:
    arm, half = 1.15 * _MARK, 0.38 * _MARK
    quarter = [(-half, -arm), (half, -arm), (half, -half)]
    turned = [quarter]
    for _ in range(3):
        turned.append([(-y, x) for x, y in turned[-1]])
    return [point for corner in turned for point in corner]


# Sizes are balanced so that all look about equally large.
_SHAPES: Sequence[Sequence[Point]] = (
    _polygon(24, 0, 1.05 * _MARK),
    _polygon(4, math.pi / 4, 1.3 * _MARK),
    _polygon(3, 0, 1.4 * _MARK),
    _polygon(4, 0, 1.4 * _MARK),
    _polygon(3, math.pi, 1.4 * _MARK),
    _cross(),
    _polygon(6, 0, 1.15 * _MARK),
)

# From a mark to its label: distances in pixels and directions, in order of preference.
_DISTANCES = (11.0, 20.0, 32.0, 46.0, 64.0)
_DIRECTIONS = ((1.0, 0.0), (-1.0, 0.0), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8), (0.0, -1.0), (0.0, 1.0))


class Box(NamedTuple):
    """A rectangle."""

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
    """The square about a point."""
    return Box(point[0] - half, point[1] - half, point[0] + half, point[1] + half)


def place_labels(
    points: Sequence[Point], widths: Sequence[float], height: float, taken: Sequence[Box], room: Box
) -> list[Box]:
    """A box for each point's label: near it, within `room`, and if possible not over `taken` or another label."""
    boxes: list[Box] = []
    marks = [around(point, 8) for point in points]
    for point, width in zip(points, widths, strict=True):
        obstacles = [*taken, *marks, *boxes]

        def cost(choice: tuple[float, Box], obstacles: Sequence[Box] = obstacles) -> float:
            reach, box = choice
            outside = (box.right - box.left) * (box.bottom - box.top) - box.overlap(room)
            return reach + 4 * outside + sum(box.overlap(other) for other in obstacles)

        boxes.append(min(_choices(point, width, height), key=cost)[1])
    return boxes


def _choices(point: Point, width: float, height: float) -> Iterator[tuple[float, Box]]:
    x, y = point
    for reach in _DISTANCES:
        for order, (right, down) in enumerate(_DIRECTIONS):
            # The distance is to the label's nearest side, or to its middle above and below the mark.
            hidden = 0.0 if right > 0 else width if right < 0 else width / 2
            left, top = x + reach * right - hidden, y + reach * down - height / 2
            yield reach + order, Box(left, top, left + width, top + height)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
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
