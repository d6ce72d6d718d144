"""The plane that methods are chosen on: how much was learned to the right, how much forgotten upwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.report.axes import Axis, distance_axis
from pipeline.report.labels import Box, around, beside
from pipeline.report.standing import Measure, Standing
from pipeline.report.svg import Drawing, Point, shortened, text_width

_LABEL = 13.0
_LEFT, _TOP, _BOTTOM = 68.0, 34.0, 58.0
_NAMES = 0.13  # of the width, at most, is kept free for names at the right


@dataclass(frozen=True)
class Plane:
    """Where standings lie on a drawing."""

    drawing: Drawing
    x: Axis
    y: Axis

    def at(self, place: Standing) -> Point:
        """The pixel of a standing."""
        return self.x(place.learned), self.y(place.forgotten)

    def path(self, places: Iterable[Standing], style: str) -> None:
        """A line through them, in their order."""
        self.drawing.path([self.at(place) for place in places], style)

    def name(self, named: Sequence[tuple[str, Standing]]) -> None:
        """Marks the base, and writes names beside it and what they name, with a leader where that is further away."""
        drawing, x, y = self.drawing, self.x, self.y
        base = (x(0), y(0))
        drawing.ring(base, 5, "base")
        ends = [self.at(place) for _, place in named]
        names = ["base", *(shortened(name, _LABEL, 0.4 * drawing.width) for name, _ in named)]
        room = Box(x.start, y.end - 8, drawing.width, y.start)
        hint = Box(x.end - 64, y.start - 20, x.end, y.start)
        marks = [around(point, 12) for point in ends]
        widths = [text_width(name, _LABEL) for name in names]
        boxes = beside([base, *ends], widths, _LABEL + 3, [hint, *marks], room)
        for name, point, box in zip(names, [base, *ends], boxes, strict=True):
            near = (min(max(point[0], box.left - 2), box.right + 2), (box.top + box.bottom) / 2)
            if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 22:
                drawing.line(point, near, "leader")
            drawing.text((box.left, box.bottom - 4), name, "label")


def open_plane(
    drawing: Drawing, places: Sequence[Standing], labels: Iterable[str], measure: Measure, learned: str, kept: str
) -> Plane:
    """Draws axes that have room for `places` and, beside them, for `labels`; `learned` and `kept` name the corpora."""
    names = max(text_width(label, _LABEL) for label in labels)
    right = drawing.width - min(names, _NAMES * drawing.width)
    across, up = measure.rounds(measure.better), measure.rounds(-measure.better)
    x = distance_axis([place.learned for place in places], _LEFT, right, measure.on_new, across)
    y = distance_axis([place.forgotten for place in places], drawing.height - _BOTTOM, _TOP, measure.on_kept, up)
    _draw_grid(drawing, x, y)
    drawing.text((0, 14), f"\N{UPWARDS ARROW} forgotten: {measure.noun}, {kept}", "axis")
    drawing.text((right, y.start + 42), f"learned: {measure.noun}, {learned} \N{RIGHTWARDS ARROW}", "axis", "end")
    return Plane(drawing, x, y)


def _draw_grid(drawing: Drawing, x: Axis, y: Axis) -> None:
    left, right, top, bottom = x.start, x.end, y.end, y.start
    for tick in x.ticks:
        drawing.line((x(tick), top), (x(tick), bottom), "zero" if tick == 0 else "grid")
        drawing.text((x(tick), bottom + 18), x.words(tick) if tick else "0", "tick", "middle")
    for tick in y.ticks:
        drawing.line((left, y(tick)), (right, y(tick)), "zero" if tick == 0 else "grid")
        drawing.text((left - 8, y(tick) + 4), y.words(tick) if tick else "0", "tick", "end")
    drawing.text((right - 4, bottom - 6), "better \N{SOUTH EAST ARROW}", "hint", "end")
