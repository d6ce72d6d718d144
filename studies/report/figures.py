"""The plots of a report: those that the runs have data for, with captions and descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.extensions.report.figures.labels import Point
from pipeline.extensions.report.figures.plots import Panel, Plot, Series, StepsPlot
from pipeline.extensions.report.formats import listed, number, percent
from pipeline.run_folder.metrics import spread
from studies.report.groups import (
    PERPLEXITY,
    Group,
    Measure,
    Standing,
    corpora,
    measure_of,
    on_frontier,
    parts,
    value_of,
)
from studies.report.learning_plot import LearningPlot, Line, Mark
from studies.report.results import REPLAY, Row

# Figures of corpora of questions, as shares of the questions.
_ANSWERS = {
    "first_token_accuracy": "first token right",
    "first_token_probability": "probability of the right first token",
    "exact_match": "whole answer right",
}


def plots_of(groups: Sequence[Group]) -> list[Plot]:
    """All plots that the runs have data for."""
    plots = (_tradeoff(groups), _rates(groups), _answers(groups), _perplexities(groups))
    return [plot for plot in plots if plot is not None]


def _tradeoff(groups: Sequence[Group]) -> Plot | None:
    """The mean of each method as a large mark; each run as a small one, with its course."""
    measure = measure_of(groups)
    places: list[tuple[str, Standing]] = []
    absent: list[str] = []
    lines: list[Line] = []
    marks: list[Mark] = []
    for group in groups:
        mean_place = group.standing(measure)
        if mean_place is None:
            absent.append(group.label)
            continue
        places.append((group.label, mean_place))
        lines += _courses(group, measure)
        lines += _spreads(group, measure, mean_place)
        marks += _marks_of_runs(group, measure)
        tooltip = f"{group.label}: {measure.describe(mean_place)}"
        marks.append(Mark(mean_place, group.style, tooltip))
    if not places:
        # Of runs without corpora of both roles there is nothing to trade.
        return None

    # Methods on the frontier come first: they get a label for certain.
    # `sorted` keeps the order of equal ones, and False comes before True.
    named = sorted(places, key=lambda pair: not on_frontier(pair[1], places))
    caption = (
        "Both axes show changes of the base's figures on held-out texts. Large marks are means "
        "over seeds, with bars of one standard deviation; small marks are single runs, thin lines "
        "their course from the base. Marks without a name are those of the table."
    )
    if absent:
        caption += f" Not drawn, because a run has no finite figure: {listed(absent)}."
    described = [f"{label}: {measure.describe(place)}" for label, place in named]
    return LearningPlot(
        name="stability-plasticity",
        title=f"Learning of {measure.new} against forgetting of {measure.kept}",
        caption=caption,
        description="; ".join(described),
        measure=measure,
        lines=lines,
        marks=marks,
        labels=named,
    )


def _courses(group: Group, measure: Measure) -> list[Line]:
    """The course of each run from the base, through all validations."""
    lines: list[Line] = []
    for row in group.rows:
        places: list[Standing] = []
        for validation in row.validations:
            place = measure.standing(row, validation.figures)
            if place is not None:
                places.append(place)
        lines.append(Line("course", group.style, places))
    return lines


def _spreads(group: Group, measure: Measure, middle: Standing) -> list[Line]:
    """Bars of one standard deviation over seeds on both axes; none of a single run."""
    ends_learned: list[float] = []
    ends_forgotten: list[float] = []
    for _, place in measure.ends(group.rows):
        ends_learned.append(place.learned)
        ends_forgotten.append(place.forgotten)
    across = spread(ends_learned)
    up = spread(ends_forgotten)
    if across is None or up is None:
        return []
    learned, forgotten = middle
    horizontal = [Standing(learned - across, forgotten), Standing(learned + across, forgotten)]
    vertical = [Standing(learned, forgotten - up), Standing(learned, forgotten + up)]
    return [Line("spread", group.style, horizontal), Line("spread", group.style, vertical)]


def _marks_of_runs(group: Group, measure: Measure) -> list[Mark]:
    """A small mark for each run; none of a single run, which the method's mark shows."""
    ends = measure.ends(group.rows)
    if len(ends) == 1:
        return []
    marks: list[Mark] = []
    for row, end in ends:
        tooltip = f"{group.label}, seed {row.seed}: {measure.describe(end)}"
        marks.append(Mark(end, group.style, tooltip, "run"))
    return marks


def _rates(groups: Sequence[Group]) -> Plot | None:
    """A line for each method through its learning rates; the chosen one has a large, named mark."""
    measure = measure_of(groups)
    lines: list[Line] = []
    marks: list[Mark] = []
    labels: list[tuple[str, Standing]] = []
    described: list[str] = []
    for group in groups:
        ends = measure.ends(group.tried)
        if len(ends) < 2:
            # Without a second rate there is no line.
            continue
        places = [place for _, place in ends]
        lines.append(Line("rates", group.style, places))
        # The name is at the chosen rate; where that run has no finite figure, at the line's end.
        named = places[-1]
        for row, place in ends:
            what = f"{group.label}, learning rate {row.learning_rate:g}"
            kind = "mark" if row.chosen else "run"
            marks.append(Mark(place, group.style, f"{what}: {measure.describe(place)}", kind))
            if row.chosen:
                named = place
        labels.append((group.label, named))
        steps = ", then ".join(measure.describe(place) for place in places)
        described.append(f"{group.label}: {steps}")
    if not labels:
        return None
    return LearningPlot(
        name="learning-rates",
        title="Results at every learning rate",
        caption=(
            "A line connects the runs of a method from its lowest learning rate to its highest, "
            "all with one seed. The large mark is the rate that was chosen, by "
            f"{measure.new} alone. Of two lines the lower one forgets less for as much learned."
        ),
        description="; ".join(described),
        measure=measure,
        lines=lines,
        marks=marks,
        labels=labels,
    )


def _answers(groups: Sequence[Group]) -> Plot | None:
    panels: list[Panel] = []
    for figure, words in _ANSWERS.items():
        for name, part in parts(groups).items():
            panels.append(Panel(f"{name}: {words}", _over_steps(groups, part, figure)))
    return _panels(
        "answers",
        "Questions answered during training",
        "Share of the held-out questions.",
        panels,
        percent,
    )


def _perplexities(groups: Sequence[Group]) -> Plot | None:
    roles = corpora(groups)
    panels: list[Panel] = []
    for name, part in parts(groups).items():
        aim = "kept" if roles[part[0]] == REPLAY else "learned"
        series = _over_steps(groups, part, PERPLEXITY.figure)
        panels.append(Panel(f"{name}, to be {aim}", series, axis="logarithmic"))
    return _panels(
        "perplexity",
        "Held-out perplexity during training",
        "Lower is better; the axes are logarithmic.",
        panels,
        number,
    )


def _panels(
    name: str, title: str, caption: str, panels: Sequence[Panel], words: Callable[[float], str]
) -> Plot | None:
    """A plot of the panels that have a line; None where none has."""
    drawn = [panel for panel in panels if panel.series]
    if not drawn:
        return None
    described: list[str] = []
    for panel in drawn:
        ends = [f"{own.label} {words(own.mean_line[-1][1])}" for own in panel.series]
        described.append(f"{panel.heading}: {', '.join(ends)}")
    return StepsPlot(
        name=name,
        title=title,
        caption=f"{caption} Means over seeds; thin lines are single runs.",
        description=f"At the end of each line. {'; '.join(described)}",
        panels=drawn,
    )


def _over_steps(groups: Sequence[Group], part: Sequence[str], figure: str) -> list[Series]:
    """The groups of which every run has the figure, by steps."""
    found: list[Series] = []
    for group in groups:
        lines = [_line(row, part, figure) for row in group.rows]
        series = Series(group.label, group.style, lines)
        # A mean over some of the runs would jump where a run is missing.
        if all(lines) and series.mean_line:
            found.append(series)
    return found


def _line(row: Row, part: Sequence[str], figure: str) -> list[Point]:
    """The values that an axis can show; a logarithmic one shows none that is 0."""
    points: list[Point] = []
    for validation in row.validations:
        value = value_of(validation.figures, part, figure)
        if value is None or not math.isfinite(value):
            continue
        if value > 0 or figure in _ANSWERS:
            points.append((float(validation.step), value))
    return points
