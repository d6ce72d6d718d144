"""The figures of a report: which ones the runs have data for, and their captions and descriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.run_folder.metrics import mean, spread
from pipeline.studies.report.drawing import Axis, Drawing, Point, linear_axis, log_axis, style_class
from pipeline.studies.report.plots import Figure, Panel, Plane, Series, panels_figure, plane_height
from pipeline.studies.report.runs import PERPLEXITY, Group, Measure, Standing, corpora, figure_names, measure_of
from pipeline.studies.report.words import percent
from pipeline.studies.results import REPLAY, Row

_MAX_POINTS = 120  # of a line; more are not visible, and make the page large
# Figures of corpora of questions, as shares of the questions.
_ANSWERS = {
    "first_token_accuracy": "first token right",
    "first_token_probability": "probability of the right first token",
    "exact_match": "whole answer right",
}


def figures_of(groups: Sequence[Group]) -> list[Figure]:
    """All figures that the runs have data for."""
    return [figure for make in (_tradeoff, _rates, _answers, _perplexities) if (figure := make(groups)) is not None]


def listed(names: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def new_and_kept(groups: Sequence[Group]) -> tuple[str, str]:
    """The names of the new corpora, and of those that must not be forgotten."""
    roles = corpora(groups)
    new, kept = ([name for name, role in roles.items() if (role == REPLAY) == replayed] for replayed in (False, True))
    return listed(new), listed(kept)


def _tradeoff(groups: Sequence[Group]) -> Figure | None:
    """The mean of each method as a large, labelled mark; each run as a small one, with its course from the base."""
    measure = measure_of(groups)
    placed = [(group, place) for group in groups if (place := group.standing(measure))]
    if not placed:
        return None
    learned, kept = new_and_kept(groups)

    def fill(drawing: Drawing) -> None:
        courses = [
            (group, [place for step in row.validations if (place := measure.standing(row, step.figures))])
            for group, _ in placed
            for row in group.rows
        ]
        places = [place for _, course in courses for place in course]
        plane = Plane(drawing, places, [group.label for group, _ in placed], measure, learned, kept)
        for group, course in courses:
            plane.line(course, f"way {style_class(group.style)}")
        for group, place in placed:
            _draw_group(plane, group, place, measure)
        plane.name([(group.label, place) for group, place in placed])

    marks = "Each mark is a run; the thin line is its course from the base."
    if any(len(group.runs) > 1 for group in groups):
        marks = (
            "Large marks are means over seeds with bars of one standard deviation, small marks single runs, and thin "
            "lines their course from the base."
        )
    absent = [group.label for group in groups if group.standing(measure) is None]
    left_out = f" Not drawn, because a run has no finite figure: {listed(absent)}." if absent else ""
    return Figure(
        "stability-plasticity",
        f"Learning of {learned} against forgetting of {kept}",
        f"Both axes show changes of the base's figures on held-out texts. {marks}{left_out}",
        "; ".join(f"{group.label}: {measure.describe(place, learned, kept)}" for group, place in placed),
        plane_height,
        fill,
    )


def _draw_group(plane: Plane, group: Group, middle: Standing, measure: Measure) -> None:
    def said(place: Standing) -> str:
        return f"learned {measure.on_new(place.learned)}, forgot {measure.on_kept(place.forgotten)}"

    ends = measure.ends(group.rows)
    for row, end in ends if len(ends) > 1 else ():
        plane.drawing.mark(plane.at(end), group.style, "run", 0.5, f"{group.label}, seed {row.seed}: {said(end)}")
    across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
    if across is not None and up is not None:
        bar = f"spread {style_class(group.style)}"
        plane.line([middle._replace(learned=middle.learned + far) for far in (-across, across)], bar)
        plane.line([middle._replace(forgotten=middle.forgotten + far) for far in (-up, up)], bar)
    plane.drawing.mark(plane.at(middle), group.style, tooltip=f"{group.label}: {said(middle)}")


def _rates(groups: Sequence[Group]) -> Figure | None:
    """A line for each method through its learning rates; the chosen rate has a large, labelled mark."""
    measure = measure_of(groups)
    ends = [(group, measure.ends(group.tried)) for group in groups]
    tried = [(group, found) for group, found in ends if len(found) > 1]
    if not tried:
        return None
    learned, kept = new_and_kept(groups)

    def fill(drawing: Drawing) -> None:
        places = [Standing(0.0, 0.0), *(place for _, found in tried for _, place in found)]
        plane = Plane(drawing, places, [group.label for group, _ in tried], measure, learned, kept)
        named = []
        for group, found in tried:
            plane.line([place for _, place in found], f"rates {style_class(group.style)}")
            for row, place in found:
                said = f"{group.label}, learning rate {row.learning_rate:g}: {measure.describe(place, learned, kept)}"
                drawing.mark(plane.at(place), group.style, *(("mark", 1.0) if row.chosen else ("run", 0.5)), said)
            named.append((group.label, next((place for row, place in found if row.chosen), found[-1][1])))
        plane.name(named)

    said = {group.label: [measure.describe(place, learned, kept) for _, place in found] for group, found in tried}
    return Figure(
        "learning-rates",
        "Results at every learning rate",
        "A line connects the runs of a method from its lowest learning rate to its highest, all with one seed. The "
        f"large mark is the rate that was chosen, by {learned} alone. Of two lines the lower one forgets less for as "
        "much learned.",
        "; ".join(f"{label}: {', then '.join(places)}" for label, places in said.items()),
        plane_height,
        fill,
    )


def _share_axis(values: Sequence[float], start: float, end: float) -> Axis:
    return linear_axis([0.0, 1.0, *values], start, end, percent)


def _answers(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}: {_ANSWERS[figure]}", _over_steps(groups, name, figure), _share_axis)
        for figure in figure_names(groups)
        if figure in _ANSWERS
        for name in corpora(groups)
    ]
    return panels_figure("answers", "Questions answered during training", "Share of the held-out questions.", panels)


def _perplexities(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(
            f"{name}, to be {'kept' if role == REPLAY else 'learned'}",
            _over_steps(groups, name, PERPLEXITY.figure, above=0.0),
            log_axis,
        )
        for name, role in corpora(groups).items()
    ]
    title = "Held-out perplexity during training"
    return panels_figure("perplexity", title, "Lower is better; the axes are logarithmic.", panels)


def _over_steps(groups: Sequence[Group], corpus: str, figure: str, above: float = -math.inf) -> list[Series]:
    """A figure of a corpus by steps; an axis cannot show values that are not `above` a bound."""
    lines = [(group, [line for row in group.rows if (line := _line(row, corpus, figure, above))]) for group in groups]
    series = [Series(group.label, group.style, of_group) for group, of_group in lines if of_group]
    return [own for own in series if own.middle]


def _line(row: Row, corpus: str, figure: str, above: float) -> list[Point]:
    """At most `_MAX_POINTS` points, each the mean of some neighbours, at the step of the last of them."""
    found = [(float(each.step), each.figures.get(corpus, {}).get(figure)) for each in row.validations]
    points = [(step, value) for step, value in found if value is not None and value > above]
    size = math.ceil(len(points) / _MAX_POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size or 1)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]
