"""The figures of a report: which ones the runs have data for, and their captions and descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.run_folder.metrics import spread
from studies.report.drawing import Point, style_class
from studies.report.formats import listed, number, percent
from studies.report.groups import (
    PERPLEXITY,
    Group,
    Standing,
    corpora,
    measure_of,
    on_frontier,
    parts,
    value_of,
)
from studies.report.plots import Figure, Mark, Panel, Panels, Plane, Series
from studies.report.results import REPLAY, Row

# Figures of corpora of questions, as shares of the questions.
_ANSWERS = {
    "first_token_accuracy": "first token right",
    "first_token_probability": "probability of the right first token",
    "exact_match": "whole answer right",
}


def figures_of(groups: Sequence[Group]) -> list[Figure]:
    """All figures that the runs have data for."""
    return [
        figure
        for make in (_tradeoff, _rates, _answers, _perplexities)
        if (figure := make(groups)) is not None
    ]


def _tradeoff(groups: Sequence[Group]) -> Figure | None:
    """The mean of each method as a large, labelled mark; each run as a small one, with its course from the base."""
    measure = measure_of(groups)
    placed = [(group, place) for group in groups if (place := group.standing(measure))]
    if not placed:
        return None
    lines: list[tuple[str, Sequence[Standing]]] = []
    marks: list[Mark] = []
    for group, middle in placed:
        for row in group.rows:
            course = [
                place for step in row.validations if (place := measure.standing(row, step.figures))
            ]
            lines.append((f"way {style_class(group.style)}", course))
        ends = measure.ends(group.rows)
        for row, end in ends if len(ends) > 1 else ():
            tooltip = f"{group.label}, seed {row.seed}: {measure.describe(end)}"
            marks.append(Mark(end, group.style, tooltip, "run"))
        across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
        if across is not None and up is not None:
            bar = f"spread {style_class(group.style)}"
            lines.append(
                (bar, [middle._replace(learned=middle.learned + far) for far in (-across, across)])
            )
            lines.append(
                (bar, [middle._replace(forgotten=middle.forgotten + far) for far in (-up, up)])
            )
        marks.append(Mark(middle, group.style, f"{group.label}: {measure.describe(middle)}"))
    places = [(group.label, place) for group, place in placed]
    named = sorted(
        places, key=lambda pair: not on_frontier(pair[1], places)
    )  # the first get a label for certain
    absent = [group.label for group in groups if group.label not in dict(places)]
    left_out = (
        f" Not drawn, because a run has no finite figure: {listed(absent)}." if absent else ""
    )
    return Plane(
        "stability-plasticity",
        f"Learning of {measure.new} against forgetting of {measure.kept}",
        "Both axes show changes of the base's figures on held-out texts. Large marks are means over seeds, with bars "
        "of one standard deviation; small marks are single runs, thin lines their course from the base. Marks "
        f"without a name are those of the table.{left_out}",
        "; ".join(f"{label}: {measure.describe(place)}" for label, place in named),
        measure,
        lines,
        marks,
        named,
    )


def _rates(groups: Sequence[Group]) -> Figure | None:
    """A line for each method through its learning rates; the chosen rate has a large, labelled mark."""
    measure = measure_of(groups)
    tried = [(group, ends) for group in groups if len(ends := measure.ends(group.tried)) > 1]
    if not tried:
        return None
    marks = [
        Mark(
            place,
            group.style,
            f"{group.label}, learning rate {row.learning_rate:g}: {measure.describe(place)}",
            kind,
        )
        for group, ends in tried
        for row, place in ends
        for kind in ["mark" if row.chosen else "run"]
    ]
    said = [
        f"{group.label}: {', then '.join(measure.describe(place) for _, place in ends)}"
        for group, ends in tried
    ]
    return Plane(
        "learning-rates",
        "Results at every learning rate",
        "A line connects the runs of a method from its lowest learning rate to its highest, all with one seed. The "
        f"large mark is the rate that was chosen, by {measure.new} alone. Of two lines the lower one forgets less for "
        "as much learned.",
        "; ".join(said),
        measure,
        [
            (f"rates {style_class(group.style)}", [place for _, place in ends])
            for group, ends in tried
        ],
        marks,
        [
            (own.label, next((place for row, place in ends if row.chosen), ends[-1][1]))
            for own, ends in tried
        ],
    )


def _answers(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}: {words}", _over_steps(groups, part, figure))
        for figure, words in _ANSWERS.items()
        for name, part in parts(groups).items()
    ]
    return _panels(
        "answers",
        "Questions answered during training",
        "Share of the held-out questions.",
        panels,
        percent,
    )


def _perplexities(groups: Sequence[Group]) -> Figure | None:
    roles = corpora(groups)
    panels = [
        Panel(
            f"{name}, to be {'kept' if roles[part[0]] == REPLAY else 'learned'}",
            _over_steps(groups, part, PERPLEXITY.figure),
            is_logarithmic=True,
        )
        for name, part in parts(groups).items()
    ]
    title = "Held-out perplexity during training"
    return _panels(
        "perplexity", title, "Lower is better; the axes are logarithmic.", panels, number
    )


def _panels(
    name: str, title: str, caption: str, panels: Sequence[Panel], words: Callable[[float], str]
) -> Figure | None:
    """Those of the panels that have a line; None where none has."""
    drawn = [panel for panel in panels if panel.series]
    ends = [
        f"{panel.heading}: "
        + ", ".join(f"{own.label} {words(own.middle[-1][1])}" for own in panel.series)
        for panel in drawn
    ]
    caption = f"{caption} Means over seeds; thin lines are single runs."
    return (
        Panels(name, title, caption, f"At the end of each line. {'; '.join(ends)}", drawn)
        if drawn
        else None
    )


def _over_steps(groups: Sequence[Group], part: Sequence[str], figure: str) -> list[Series]:
    """The groups of which every run has the figure, by steps."""
    lines = [(group, [_line(row, part, figure) for row in group.rows]) for group in groups]
    series = [
        Series(group.label, group.style, of_group) for group, of_group in lines if all(of_group)
    ]
    return [own for own in series if own.middle]


def _line(row: Row, part: Sequence[str], figure: str) -> list[Point]:
    """The values that an axis can show; a logarithmic one shows none that is 0."""
    found = [(float(each.step), value_of(each.figures, part, figure)) for each in row.validations]
    finite = [(step, value) for step, value in found if value is not None and math.isfinite(value)]
    return [(step, value) for step, value in finite if value > 0 or figure in _ANSWERS]
