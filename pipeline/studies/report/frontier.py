"""The picture of a frontier: learned against forgotten, with the cost of inference as the size of a mark."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.config.method import title_of
from pipeline.studies.frontier import Point
from pipeline.studies.report.page import style_sheet
from pipeline.studies.report.plots import open_plane
from pipeline.studies.report.runs import PERPLEXITY, Standing, not_dominated, style_of_method
from pipeline.studies.report.svg import Drawing

WIDTH, HEIGHT = 860.0, 560.0
_SIZES = (0.75, 1.5)
"""Of the marks of a model that costs as much as its base, and of one that costs twice as much."""


def frontier_picture(points: Sequence[Point]) -> str:
    """The points of a frontier, of which the first is the base, as an SVG file for light and dark pages.

    Those that no other point beats in both figures are joined by a line and named.
    """
    base, *others = points
    placed = [(point, _standing(point, base)) for point in others if math.isfinite(point.new + point.old)]
    front = sorted(not_dominated(placed), key=lambda pair: pair[1].learned)
    said = [f"{point.name}: {PERPLEXITY.describe(place, 'new text', 'old text')}" for point, place in front]
    drawing = Drawing("frontier", WIDTH, HEIGHT, "What was learned, and what was forgotten", "; ".join(said))
    names = [point.name for point, _ in front]
    plane = open_plane(drawing, [place for _, place in placed], names, PERPLEXITY, "new text", "old text")
    plane.path([place for _, place in front], "rates style-6")
    for point, place in sorted(placed, key=lambda pair: -pair[0].cost):
        small, large = _SIZES
        size = small + (large - small) * (point.cost - 1)
        title = f"{point.name}, {point.cost:.2f} x the base's FLOPs: {PERPLEXITY.describe(place, 'new', 'old')}"
        drawing.mark(plane.at(place), style_of_method(point.rows[0].method), size=size, title=title)
    plane.name([(point.name, place) for point, place in front], [place for _, place in placed])
    _draw_legend(drawing, {point.rows[0].method for point in others})
    return drawing.markup(style_sheet(figures_only=True))


def _draw_legend(drawing: Drawing, methods: set[str]) -> None:
    left, top = 150.0, 62.0
    for at, method in enumerate(sorted(methods, key=style_of_method)):
        drawing.mark((left, top + 20 * at), style_of_method(method))
        drawing.text((left + 14, top + 20 * at + 4), title_of(method), "label small")
    bottom = top + 20 * len(methods)
    drawing.text((left - 6, bottom + 6), "larger marks cost more FLOPs a token", "hint")


def _standing(point: Point, base: Point) -> Standing:
    return Standing(math.log(base.new / point.new), math.log(point.old / base.old))
