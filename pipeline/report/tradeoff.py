"""The picture that a method is chosen by: what was forgotten against what was learned."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.report.groups import Group
from pipeline.report.plane import Plane, open_plane
from pipeline.report.standing import Measure, Standing
from pipeline.report.svg import Drawing, style_class
from pipeline.run_folder.averages import spread
from pipeline.run_folder.study_summary import Row


def draw_tradeoff(drawing: Drawing, groups: Sequence[Group], measure: Measure, learned: str, kept: str) -> None:
    """A small mark a run, a large one and a name for the mean of a method's, bars of one standard deviation, and the
    way from the base as a thin line.

    Groups without a standing are left out. `learned` and `kept` name the corpora.
    """
    placed = [(one, place) for one in groups if (place := one.standing(measure))]
    ways = [(one, [_way(row, measure) for row in one.rows]) for one, _ in placed]
    places = [place for _, of in ways for way in of for place in way]
    plane = open_plane(drawing, places, [one.label for one, _ in placed], measure, learned, kept)
    for one, of in ways:
        for way in of:
            plane.path(way, f"way {style_class(one.style)}")
    for one, place in placed:
        _draw_group(plane, one, place, measure)
    plane.name([(one.label, place) for one, place in placed])


def draw_rates(drawing: Drawing, groups: Sequence[Group], measure: Measure, learned: str, kept: str) -> None:
    """A line a method through what each learning rate led to, from the lowest to the highest; the chosen one has the
    large mark and the name.

    Rates without a standing are left out, and so are groups with none. `learned` and `kept` name the corpora.
    """
    tried = [(one, found) for one in groups if (found := _standings(one.tried, measure))]
    places = [Standing(0.0, 0.0), *(place for _, found in tried for _, place in found)]
    plane = open_plane(drawing, places, [one.label for one, _ in tried], measure, learned, kept)
    named = []
    for one, found in tried:
        plane.path([place for _, place in found], f"rates {style_class(one.style)}")
        chosen = one.rows[0].learning_rate
        for row, place in found:
            title = f"{one.label}, learning rate {row.learning_rate:g}: {measure.said(place, learned, kept)}"
            kind, size = ("mark", 1.0) if row.learning_rate == chosen else ("run", 0.5)
            drawing.mark(plane.at(place), one.style, kind, size=size, title=title)
        named.append((one.label, next((place for row, place in found if row.learning_rate == chosen), found[-1][1])))
    plane.name(named)


def _way(row: Row, measure: Measure) -> list[Standing]:
    """From the base to the end."""
    return [place for look in row.looks if (place := measure.standing(row, look.figures))]


def _standings(rows: Sequence[Row], measure: Measure) -> list[tuple[Row, Standing]]:
    """Those of the rows that have one, with where they end."""
    return [(row, place) for row in rows if (place := measure.standing(row, row.after))]


def _draw_group(plane: Plane, one: Group, middle: Standing, measure: Measure) -> None:
    def said(place: Standing) -> str:
        return f"learned {measure.on_new(place.learned)}, forgot {measure.on_kept(place.forgotten)}"

    drawing = plane.drawing
    ends = _standings(one.rows, measure)
    for row, end in ends if len(ends) > 1 else ():
        seed = f", seed {row.seed}" if row.seed is not None else ""
        drawing.mark(plane.at(end), one.style, "run", size=0.5, title=f"{one.label}{seed}: {said(end)}")
    across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
    if across is not None and up is not None:
        bar = f"spread {style_class(one.style)}"
        left, right = (middle._replace(learned=middle.learned + far) for far in (-across, across))
        lower, upper = (middle._replace(forgotten=middle.forgotten + far) for far in (-up, up))
        drawing.line(plane.at(left), plane.at(right), bar)
        drawing.line(plane.at(lower), plane.at(upper), bar)
    drawing.mark(plane.at(middle), one.style, title=f"{one.label}: {said(middle)}")
