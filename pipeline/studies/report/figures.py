"""The figures of a report: which ones the runs have data for, and their captions and descriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.run_folder.metrics import spread
from pipeline.studies.report.drawing import Point, style_class
from pipeline.studies.report.plots import Figure, Mark, Panel, Plane, Series, panels_figure
from pipeline.studies.report.runs import PERPLEXITY, Group, Standing, corpora, measure_of, on_frontier, parts, value_of
from pipeline.studies.report.words import number, percent
from pipeline.studies.results import REPLAY, Row

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
    roles, shown = corpora(groups), parts(groups)
    is_kept = {name: roles[of[0]] == REPLAY for name, of in shown.items()}
    return listed([name for name in shown if not is_kept[name]]), listed([name for name in shown if is_kept[name]])


def _tradeoff(groups: Sequence[Group]) -> Figure | None:
    """The mean of each method as a large, labelled mark; each run as a small one, with its course from the base."""
    measure = measure_of(groups)
    placed = [(group, place) for group in groups if (place := group.standing(measure))]
    if not placed:
        return None
    learned, kept = new_and_kept(groups)
    lines: list[tuple[str, Sequence[Standing]]] = []
    marks: list[Mark] = []
    for group, middle in placed:
        for row in group.rows:
            course = [place for step in row.validations if (place := measure.standing(row, step.figures))]
            lines.append((f"way {style_class(group.style)}", course))
        ends = measure.ends(group.rows)
        for row, end in ends if len(ends) > 1 else ():
            marks.append(
                Mark(end, group.style, f"{group.label}, seed {row.seed}: {measure.describe(end, learned, kept)}", "run")
            )
        across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
        if across is not None and up is not None:
            bar = f"spread {style_class(group.style)}"
            lines.append((bar, [middle._replace(learned=middle.learned + far) for far in (-across, across)]))
            lines.append((bar, [middle._replace(forgotten=middle.forgotten + far) for far in (-up, up)]))
        marks.append(Mark(middle, group.style, f"{group.label}: {measure.describe(middle, learned, kept)}"))
    places = [(group.label, place) for group, place in placed]
    named = sorted(places, key=lambda pair: not on_frontier(pair[1], places))  # the first get a label for certain
    absent = [group.label for group in groups if group.label not in dict(places)]
    left_out = f" Not drawn, because a run has no finite figure: {listed(absent)}." if absent else ""
    return Plane(measure, learned, kept, lines, marks, named).figure(
        "stability-plasticity",
        f"Learning of {learned} against forgetting of {kept}",
        "Both axes show changes of the base's figures on held-out texts. Large marks are means over seeds, with bars "
        "of one standard deviation; small marks are single runs, thin lines their course from the base. Marks "
        f"without a name are those of the table.{left_out}",
        "; ".join(f"{label}: {measure.describe(place, learned, kept)}" for label, place in named),
    )


def _rates(groups: Sequence[Group]) -> Figure | None:
    """A line for each method through its learning rates; the chosen rate has a large, labelled mark."""
    measure, (learned, kept) = measure_of(groups), new_and_kept(groups)
    ends = [(group, measure.ends(group.tried)) for group in groups]
    tried = [(group, found) for group, found in ends if len(found) > 1]
    if not tried:
        return None
    said = {group.label: [measure.describe(place, learned, kept) for _, place in found] for group, found in tried}
    lines = [(f"rates {style_class(group.style)}", [place for _, place in found]) for group, found in tried]
    marks = [
        Mark(place, group.style, f"{group.label}, learning rate {row.learning_rate:g}: {words}", kind)
        for group, found in tried
        for (row, place), words in zip(found, said[group.label], strict=True)
        for kind in ["mark" if row.chosen else "run"]
    ]
    named = [(own.label, next((place for row, place in found if row.chosen), found[-1][1])) for own, found in tried]
    return Plane(measure, learned, kept, lines, marks, named).figure(
        "learning-rates",
        "Results at every learning rate",
        "A line connects the runs of a method from its lowest learning rate to its highest, all with one seed. The "
        f"large mark is the rate that was chosen, by {learned} alone. Of two lines the lower one forgets less for as "
        "much learned.",
        "; ".join(f"{label}: {', then '.join(places)}" for label, places in said.items()),
    )


def _answers(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}: {words}", _over_steps(groups, part, figure))
        for figure, words in _ANSWERS.items()
        for name, part in parts(groups).items()
    ]
    return panels_figure(
        "answers", "Questions answered during training", "Share of the held-out questions.", panels, percent
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
    return panels_figure("perplexity", title, "Lower is better; the axes are logarithmic.", panels, number)


def _over_steps(groups: Sequence[Group], part: Sequence[str], figure: str) -> list[Series]:
    """The groups of which every run has the figure, by steps."""
    lines = [(group, [_line(row, part, figure) for row in group.rows]) for group in groups]
    series = [Series(group.label, group.style, of_group) for group, of_group in lines if all(of_group)]
    return [own for own in series if own.middle]


def _line(row: Row, part: Sequence[str], figure: str) -> list[Point]:
    """The values that an axis can show; a logarithmic one shows none that is 0."""
    found = [(float(each.step), value_of(each.figures, part, figure)) for each in row.validations]
    finite = [(step, value) for step, value in found if value is not None and math.isfinite(value)]
    return [(step, value) for step, value in finite if value > 0 or figure in _ANSWERS]
