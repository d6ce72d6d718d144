"""The figures of a report: which ones the runs have data for, and their captions and descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.run_folder.metrics import mean, spread
from pipeline.studies.report.axes import axis_from_zero, count, layer_axis, log_axis, share_axis, short
from pipeline.studies.report.plots import Panel, Plane, Series, draw_panels, open_plane, panels_height
from pipeline.studies.report.runs import (
    PERPLEXITY,
    Group,
    Measure,
    Run,
    Standing,
    corpora,
    figure_names,
    measure_of,
)
from pipeline.studies.report.svg import Drawing, Point, style_class
from pipeline.studies.results import REPLAY, Row


def draw_tradeoff(drawing: Drawing, groups: Sequence[Group], measure: Measure, learned: str, kept: str) -> None:
    """Draws the mean of each method as a large, labelled mark with bars of one standard deviation; each run as a small
    mark, with a thin line from the base through its validations.

    Groups without a standing are left out. `learned` and `kept` name the corpora.
    """
    placed = [(group, place) for group in groups if (place := group.standing(measure))]
    courses = [
        (group, [place for step in row.validations if (place := measure.standing(row, step.figures))])
        for group, _ in placed
        for row in group.rows
    ]
    places = [place for _, course in courses for place in course]
    plane = open_plane(drawing, places, [group.label for group, _ in placed], measure, learned, kept)
    for group, course in courses:
        plane.path(course, f"way {style_class(group.style)}")
    for group, place in placed:
        _draw_group(plane, group, place, measure)
    plane.name([(group.label, place) for group, place in placed])


def draw_rates(drawing: Drawing, groups: Sequence[Group], measure: Measure, learned: str, kept: str) -> None:
    """Draws a line for each method through its learning rates, in rising order; the chosen rate has a large, labelled
    mark.

    Rates without a standing are left out. `learned` and `kept` name the corpora.
    """
    tried = [(group, found) for group in groups if (found := _standings(group.tried, measure))]
    places = [Standing(0.0, 0.0), *(place for _, found in tried for _, place in found)]
    plane = open_plane(drawing, places, [group.label for group, _ in tried], measure, learned, kept)
    named = []
    for group, found in tried:
        plane.path([place for _, place in found], f"rates {style_class(group.style)}")
        chosen = group.rows[0].learning_rate
        for row, place in found:
            title = f"{group.label}, learning rate {row.learning_rate:g}: {measure.describe(place, learned, kept)}"
            kind, size = ("mark", 1.0) if row.learning_rate == chosen else ("run", 0.5)
            drawing.mark(plane.at(place), group.style, kind, size=size, title=title)
        named.append((group.label, next((place for row, place in found if row.learning_rate == chosen), found[-1][1])))
    plane.name(named)


def _standings(rows: Sequence[Row], measure: Measure) -> list[tuple[Row, Standing]]:
    """The rows that have a standing at their end, with it."""
    return [(row, place) for row in rows if (place := measure.standing(row, row.after))]


def _draw_group(plane: Plane, group: Group, middle: Standing, measure: Measure) -> None:
    def said(place: Standing) -> str:
        return f"learned {measure.on_new(place.learned)}, forgot {measure.on_kept(place.forgotten)}"

    drawing = plane.drawing
    ends = _standings(group.rows, measure)
    for row, end in ends if len(ends) > 1 else ():
        seed = f", seed {row.seed}" if row.seed is not None else ""
        drawing.mark(plane.at(end), group.style, "run", size=0.5, title=f"{group.label}{seed}: {said(end)}")
    across, up = (spread([end[axis] for _, end in ends]) for axis in (0, 1))
    if across is not None and up is not None:
        bar = f"spread {style_class(group.style)}"
        left, right = (middle._replace(learned=middle.learned + far) for far in (-across, across))
        lower, upper = (middle._replace(forgotten=middle.forgotten + far) for far in (-up, up))
        drawing.line(plane.at(left), plane.at(right), bar)
        drawing.line(plane.at(lower), plane.at(upper), bar)
    drawing.mark(plane.at(middle), group.style, title=f"{group.label}: {said(middle)}")


# Figures of corpora of questions, as shares of the questions.
_ANSWERS = {
    "first_token_accuracy": "first token right",
    "first_token_probability": "probability of the right first token",
    "exact_match": "whole answer right",
}
_ROUTED = "preserved_fraction"
_COSINE = "base_stream_cosine/layer_"
_MAX_POINTS = 120  # of a line; more are not visible, and make the page large


@dataclass(frozen=True)
class Figure:
    """A figure at any width. `name` is that of its file and of its section; `description` is for screen readers."""

    name: str
    title: str
    caption: str
    description: str
    height: Callable[[float], float]
    fill: Callable[[Drawing], None]

    def draw(self, width: float, name: str | None = None) -> Drawing:
        """The drawing, `width` CSS pixels wide; `name` must be unique on the page."""
        drawing = Drawing(name or self.name, width, self.height(width), self.title, self.description)
        self.fill(drawing)
        return drawing


def figures_of(groups: Sequence[Group]) -> list[Figure]:
    """All figures that the runs have data for."""
    makers = (_tradeoff, _rates, _answers, _perplexities, _routing, _gates, _drift)
    return [figure for make in makers if (figure := make(groups)) is not None]


def listed(names: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def new_and_kept(groups: Sequence[Group]) -> tuple[str, str]:
    """The names of the new corpora, and of those that must not be forgotten."""
    roles = corpora(groups)
    new, kept = ([name for name, role in roles.items() if (role == REPLAY) == replayed] for replayed in (False, True))
    return listed(new), listed(kept)


def _tradeoff(groups: Sequence[Group]) -> Figure | None:
    measure = measure_of(row for group in groups for row in group.rows)
    placed = [(group, place) for group in groups if (place := group.standing(measure))]
    if not placed:
        return None
    learned, kept = new_and_kept(groups)
    several = any(len(group.runs) > 1 for group in groups)
    marks = (
        "Large marks are means over seeds with bars of one standard deviation, small marks single runs, and thin lines "
        "their course from the base."
        if several
        else "Each mark is a run; the thin line is its course from the base."
    )
    absent = [group.label for group in groups if group.standing(measure) is None]
    left_out = f" Not drawn, because a run has no finite figure: {listed(absent)}." if absent else ""
    return Figure(
        "stability-plasticity",
        f"Learning of {learned} against forgetting of {kept}",
        f"Both axes show changes of the base's figures on held-out texts. {marks}{left_out}",
        "; ".join(f"{group.label}: {measure.describe(place, learned, kept)}" for group, place in placed),
        _wide_height,
        lambda drawing: draw_tradeoff(drawing, groups, measure, learned, kept),
    )


def _rates(groups: Sequence[Group]) -> Figure | None:
    measure = measure_of(row for group in groups for row in group.rows)
    ends = {group.label: [place for _, place in _standings(group.tried, measure)] for group in groups}
    if all(len(places) < 2 for places in ends.values()):
        return None
    learned, kept = new_and_kept(groups)
    said = {label: [measure.describe(place, learned, kept) for place in places] for label, places in ends.items()}
    return Figure(
        "learning-rates",
        "Results at every learning rate",
        "A line connects the runs of a method from its lowest learning rate to its highest, all with one seed. The "
        f"large mark is the rate that was chosen, by {learned} alone. Of two lines the lower one forgets less for as "
        "much learned.",
        "; ".join(f"{label}: {', then '.join(places)}" for label, places in said.items()),
        _wide_height,
        lambda drawing: draw_rates(drawing, groups, measure, learned, kept),
    )


def _perplexities(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}, to be {'kept' if role == REPLAY else 'learned'}", series, log_axis, _steps(groups))
        for name, role in corpora(groups).items()
        if (series := _over_steps(groups, name, PERPLEXITY.figure, above=0.0))
    ]
    return _lines(
        "perplexity",
        "Held-out perplexity during training",
        "Lower is better; the axes are logarithmic." + _means(groups),
        panels,
    )


def _answers(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}: {_ANSWERS[figure]}", series, share_axis, _steps(groups))
        for figure in figure_names(groups)
        if figure in _ANSWERS
        for name in corpora(groups)
        if (series := _over_steps(groups, name, figure))
    ]
    return _lines(
        "answers", "Questions answered during training", "Share of the held-out questions." + _means(groups), panels
    )


def _routing(groups: Sequence[Group]) -> Figure | None:
    series = [
        Series(group.label, group.style, lines)
        for group in groups
        if (lines := [line for run in group.runs if (line := _routed_share(run))])
    ]
    panel = Panel("share of tokens", series, share_axis, _steps(groups))
    return _lines(
        "routing",
        "How often the router takes the preserved path",
        "Share of the training tokens whose preserved and adapted logits have a cosine above the router's threshold."
        + _means(groups),
        [panel] if series else [],
    )


def _gates(groups: Sequence[Group]) -> Figure | None:
    # The thresholds of several seeds differ, so there is no mean of their lines: the first seed's are drawn.
    gated = [(group, gates[0]) for group in groups if (gates := [run.gate for run in group.runs if run.gate])]
    roc = [Series(group.label, group.style, [sorted(gate.roc)]) for group, gate in gated]
    calibration = [
        Series(group.label, group.style, [[(predicted, new) for predicted, new, _ in gate.calibration]])
        for group, gate in gated
    ]
    panels = [
        Panel("new text that is open", roc, share_axis, "other text that is open", share_axis),
        Panel("share that is new", calibration, share_axis, "predicted probability", share_axis),
    ]
    return _lines(
        "gate",
        "How well the gates tell new text from other text",
        "On text that was not used for fitting, for every threshold and by predicted probability. The threshold in use "
        "opens at most the share of other text that the setting max_open_fraction allows.",
        panels if gated else [],
    )


def _drift(groups: Sequence[Group]) -> Figure | None:
    series = [
        Series(group.label, group.style, lines)
        for group in groups
        if (lines := [line for run in group.runs if (line := _last_drift(run))])
    ]
    panel = Panel("1 \N{MINUS SIGN} cosine", series, axis_from_zero, "layer", layer_axis, marked=True)
    return _lines(
        "drift",
        "How far each layer's base stream moved",
        "At the last validation, on text of the base's own domain: at 0 the stream has the base's direction. "
        "Methods that train the base itself have no base stream to compare with.",
        [panel] if series else [],
    )


def _lines(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Figure | None:
    if not panels:
        return None
    ends = [
        f"{panel.heading}: "
        + ", ".join(f"{line.label} {short(line.middle[-1][1])}" for line in panel.series if line.middle)
        for panel in panels
    ]
    return Figure(
        name,
        title,
        caption,
        f"At the end of each line. {'; '.join(ends)}",
        lambda width: panels_height(panels, width),
        lambda drawing: draw_panels(drawing, panels),
    )


def _wide_height(width: float) -> float:
    return min(560.0, max(380.0, 0.66 * width))


def _means(groups: Sequence[Group]) -> str:
    return " Means over seeds, thin lines single runs." if any(len(group.runs) > 1 for group in groups) else ""


def _steps(groups: Sequence[Group]) -> str:
    """The label of the horizontal axis, with the tokens per step where all runs have the same."""
    sizes = {
        round(row.tokens_seen / row.steps) if row.tokens_seen and row.steps else None
        for group in groups
        for row in group.rows
    }
    size = sizes.pop() if len(sizes) == 1 else None
    return f"steps of {count(size)} tokens" if size else "steps"


def _over_steps(groups: Sequence[Group], corpus: str, figure: str, above: float = -math.inf) -> list[Series]:
    """A figure of a corpus by steps; an axis cannot show values that are not `above` a bound."""
    found = []
    for group in groups:
        lines = []
        for row in group.rows:
            points = [
                (float(validation.step), validation.figures.get(corpus, {}).get(figure))
                for validation in row.validations
            ]
            lines.append(_thinned([(step, value) for step, value in points if value is not None and value > above]))
        if all(lines):
            found.append(Series(group.label, group.style, lines))
    return found


def _routed_share(run: Run) -> list[Point]:
    """The share of preserved tokens, by steps."""
    return _thinned([(line["step"], line[_ROUTED]) for line in run.metrics if _ROUTED in line])


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MAX_POINTS` points, each the mean of some neighbours, at the step of the last of them."""
    size = math.ceil(len(points) / _MAX_POINTS)
    runs = [points[at : at + size] for at in range(0, len(points), size or 1)]
    return [(run[-1][0], mean([value for _, value in run])) for run in runs]


def _last_drift(run: Run) -> list[Point]:
    """One minus the base stream's cosine to the base model's, by layer, from 1; at the last validation that has it."""
    measured = (line for line in reversed(run.metrics) if any(name.startswith(_COSINE) for name in line))
    line: Mapping[str, float] = next(measured, {})
    cosines = {int(name.removeprefix(_COSINE)): line[name] for name in line if name.startswith(_COSINE)}
    return [(layer + 1.0, 1 - cosine) for layer, cosine in sorted(cosines.items())]
