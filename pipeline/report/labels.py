"""Where names go beside what they name, so that none lies on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.report.svg import Point

# Beside a mark: pixels from its middle to the label, and directions, in the order of preference.
_DISTANCES = (11.0, 20.0, 32.0, 46.0, 64.0)
_DIRECTIONS = ((1.0, 0.0), (-1.0, 0.0), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8), (0.0, -1.0), (0.0, 1.0))


class Box(NamedTuple):
    """A rectangle from its left upper to its right lower corner."""

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


def beside(
    points: Sequence[Point], widths: Sequence[float], height: float, taken: Sequence[Box], room: Box
) -> list[Box]:
    """A box for the label of each point, near it, within `room`, off `taken` and off each other as far as may be."""
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
            # The side of the label that looks at the mark is at the distance: left, right, or its middle.
            hidden = 0.0 if right > 0 else width if right < 0 else width / 2
            left, top = x + reach * right - hidden, y + reach * down - height / 2
            yield reach + order, Box(left, top, left + width, top + height)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as may be to `places`, at least `gap` apart, from `low` to `high` if they fit there."""
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
