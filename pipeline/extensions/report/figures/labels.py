"""Places for the labels of marks and lines, so that they do not cover each other.

Everything is in CSS pixels from the top left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


def box_around(point: Point, half: float) -> Box:
    """A square of side `2 * half` with its middle at `point`."""
    x, y = point
    return Box(x - half, y - half, x + half, y + half)


def text_width(text: str, size: float) -> float:
    """An estimate of the width of a text; the reader's fonts are not known."""
    width = 0.0
    for letter in text:
        # From Hangul on letters are about square.
        width += 1.0 if ord(letter) > 0x1100 else 0.58
    return size * width


def shortened(text: str, size: float, width: float) -> str:
    """`text`, cut to about `width` with an ellipsis where it is longer."""
    own_width = text_width(text, size)
    if own_width <= width:
        return text
    letters = int(len(text) * width / own_width)
    return f"{text[: letters - 1].rstrip()}\N{HORIZONTAL ELLIPSIS}"


def wrapped(text: str, size: float, width: float) -> list[str]:
    """The lines of `text` where it has about `width`; a word that is longer is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        # The estimate of a width that was made of the same text has errors of rounding.
        if lines and text_width(longer, size) <= width + 0.01:
            lines[-1] = longer
        else:
            lines.append(shortened(word, size, width + 0.01))
    return lines or [""]


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
    points: Sequence[Point],
    widths: Sequence[float],
    height: float,
    taken: Sequence[Box],
    within: Box,
) -> list[Box | None]:
    """A box for the label of each point: near it, inside `within`, preferably not over `taken`.

    `widths` are of the labels, `height` is the same for all. A label that would cover that of an
    earlier point has no box: None.
    """
    marks = [box_around(point, 8) for point in points]
    boxes: list[Box | None] = []
    labels: list[Box] = []
    for point, width in zip(points, widths, strict=True):
        obstacles = [*taken, *marks, *labels]
        best = _best_place(point, width, height, obstacles, within)
        if any(best.overlap(label) > 1 for label in labels):
            boxes.append(None)
            continue
        boxes.append(best)
        labels.append(best)
    return boxes


def _best_place(
    point: Point, width: float, height: float, obstacles: Sequence[Box], within: Box
) -> Box:
    """Of all distances and directions the box with the lowest penalty."""
    x, y = point
    choices: list[tuple[float, Box]] = []
    for distance in _DISTANCES:
        for preference, (right, down) in enumerate(_DIRECTIONS):
            # The distance is to the label's nearest side, or to its middle above and below a mark.
            left = x + distance * right
            if right < 0:
                left -= width
            elif right == 0:
                left -= width / 2
            top = y + distance * down - height / 2
            box = Box(left, top, left + width, top + height)
            # In square pixels, beside which distances count where nothing is covered. What is
            # outside cannot be read, and counts four times.
            outside = width * height - box.overlap(within)
            covered = sum(box.overlap(other) for other in obstacles)
            choices.append((distance + preference + 4 * outside + covered, box))
    return min(choices)[1]


def moved_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions close to `places`, at least `gap` apart, from `low` to `high` if they fit there."""
    # From the lowest up, each is pushed above the one before; what is then too high is pushed down
    # from the highest on.
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    edge = low
    for index in order:
        found[index] = max(found[index], edge)
        edge = found[index] + gap
    edge = high
    for index in reversed(order):
        found[index] = min(found[index], edge)
        edge = found[index] - gap
    return found
