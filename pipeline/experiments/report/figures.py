"""Which pictures some runs have, and what each says in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.experiments.report.axes import axis_from_zero, count, layer_axis, log_axis, share_axis, short
from pipeline.experiments.report.plots import Panel, Plane, Series, draw_panels, open_plane, panels_height
from pipeline.experiments.report.runs import (
    PERPLEXITY,
    Group,
    Measure,
    Run,
    Standing,
    corpora,
    figure_names,
    measure_of,
)
from pipeline.experiments.report.svg import Drawing, Point, style_class
from pipeline.experiments.results import REPLAY, Row
from pipeline.run_folder.metrics import mean, spread

# --- The picture that a method is chosen by: what was forgotten against what was learned ----------------------------


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
    return [place for validation in row.validations if (place := measure.standing(row, validation.figures))]


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


# --- Which pictures some runs have, and what each says in words ---

# What corpora of prompts have, as shares of the questions.
_ANSWERS = {
    "first_token_accuracy": "first token right",
    "first_token_probability": "probability of the right first token",
    "exact_match": "whole answer right",
}
_ROUTED = "preserved_fraction"
_COSINE = "base_stream_cosine/layer_"
# A line of more points shows no more, and makes the page heavy.
_MOST_POINTS = 120


@dataclass(frozen=True)
class Figure:
    """A picture at any width. `name` is its file's and its place's on the page, `caption` what a reader should know,
    `description` what it shows to those who do not see it."""

    name: str
    title: str
    caption: str
    description: str
    height: Callable[[float], float]
    fill: Callable[[Drawing], None]

    def draw(self, width: float, name: str | None = None) -> Drawing:
        """The picture, `width` CSS pixels wide; `name` tells two of the same on one page apart."""
        drawing = Drawing(name or self.name, width, self.height(width), self.title, self.description)
        self.fill(drawing)
        return drawing


def figures_of(groups: Sequence[Group]) -> list[Figure]:
    """All pictures that the runs have the figures for."""
    found = [
        _tradeoff(groups),
        _rates(groups),
        _answers(groups),
        _perplexities(groups),
        _routing(groups),
        _drift(groups),
    ]
    return [one for one in found if one is not None]


def listed(names: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def new_and_kept(groups: Sequence[Group]) -> tuple[str, str]:
    """The names of the corpora that are learned, and of those that must not be forgotten."""
    roles = corpora(groups)
    new, kept = ([name for name, role in roles.items() if (role == REPLAY) == replayed] for replayed in (False, True))
    return listed(new), listed(kept)


def _tradeoff(groups: Sequence[Group]) -> Figure | None:
    measure = measure_of(row for one in groups for row in one.rows)
    placed = [(one, place) for one in groups if (place := one.standing(measure))]
    if not placed:
        return None
    learned, kept = new_and_kept(groups)
    several = any(len(one.runs) > 1 for one in groups)
    marks = (
        "Large marks are means over seeds with bars of one standard deviation, small ones single runs, and thin lines "
        "their way from the base."
        if several
        else "A mark is a run; the thin line is its way from the base."
    )
    absent = [one.label for one in groups if one.standing(measure) is None]
    left_out = f" Not drawn, for want of a finite figure in every run: {listed(absent)}." if absent else ""
    return Figure(
        "stability-plasticity",
        f"What was learned of {learned} against what was forgotten of {kept}",
        f"Both axes are what became of the base's figures on held-out texts. {marks}{left_out}",
        "; ".join(f"{one.label}: {measure.said(place, learned, kept)}" for one, place in placed),
        _wide_height,
        lambda drawing: draw_tradeoff(drawing, groups, measure, learned, kept),
    )


def _rates(groups: Sequence[Group]) -> Figure | None:
    measure = measure_of(row for one in groups for row in one.rows)
    ends = {one.label: [place for row in one.tried if (place := measure.standing(row, row.after))] for one in groups}
    if all(len(places) < 2 for places in ends.values()):
        return None
    learned, kept = new_and_kept(groups)
    said = {label: [measure.said(place, learned, kept) for place in places] for label, places in ends.items()}
    return Figure(
        "learning-rates",
        "What each learning rate led to",
        "A line joins the runs of a method from its lowest learning rate to its highest, all with one seed. The large "
        f"mark is the rate that the study took, for {learned} alone. Of two lines the lower one forgets less for as "
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
        "Held-out perplexity on the way",
        "Lower is better; the axes are logarithmic." + _means(groups),
        panels,
    )


def _answers(groups: Sequence[Group]) -> Figure | None:
    panels = [
        Panel(f"{name}: {_ANSWERS[figure]}", series, lambda _, start, end: share_axis(start, end), _steps(groups))
        for figure in figure_names(groups)
        if figure in _ANSWERS
        for name in corpora(groups)
        if (series := _over_steps(groups, name, figure))
    ]
    return _lines(
        "answers", "Questions answered on the way", "Share of the held-out questions." + _means(groups), panels
    )


def _routing(groups: Sequence[Group]) -> Figure | None:
    series = [
        Series(one.label, one.style, lines)
        for one in groups
        if (lines := [line for run in one.runs if (line := _thinned(_metric(run, _ROUTED)))])
    ]
    panel = Panel("share of tokens", series, lambda _, start, end: share_axis(start, end), _steps(groups))
    return _lines(
        "routing",
        "How often the router keeps to the preserved path",
        "Share of the training tokens whose preserved and adapted logits agree beyond the router's threshold."
        + _means(groups),
        [panel] if series else [],
    )


def _drift(groups: Sequence[Group]) -> Figure | None:
    series = [
        Series(one.label, one.style, lines)
        for one in groups
        if (lines := [line for run in one.runs if (line := _last_drift(run))])
    ]
    panel = Panel(
        "1 \N{MINUS SIGN} cosine",
        series,
        axis_from_zero,
        "layer",
        layer_axis,
        marked=True,
    )
    return _lines(
        "drift",
        "How far each layer's base stream moved",
        "At the last validation, on text of the base's own domain: 0 is a stream that points where the base's does. "
        "Methods that train the base itself have nothing to compare with.",
        [panel] if series else [],
    )


def _lines(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Figure | None:
    if not panels:
        return None
    ends = [
        f"{panel.heading}: "
        + ", ".join(f"{one.label} {short(one.middle[-1][1])}" for one in panel.series if one.middle)
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
    return " Means over seeds, thin lines single runs." if any(len(one.runs) > 1 for one in groups) else ""


def _steps(groups: Sequence[Group]) -> str:
    """What the horizontal axis counts, in tokens too where every run has as many a step."""
    sizes = {
        round(row.tokens_seen / row.steps) if row.tokens_seen and row.steps else None
        for one in groups
        for row in one.rows
    }
    size = sizes.pop() if len(sizes) == 1 else None
    return f"steps of {count(size)} tokens" if size else "steps"


def _over_steps(groups: Sequence[Group], corpus: str, figure: str, above: float = -math.inf) -> list[Series]:
    """A figure of a corpus by steps; values that are not `above` a bound no axis can show."""
    found = []
    for one in groups:
        lines = []
        for row in one.rows:
            points = [
                (float(validation.step), validation.figures.get(corpus, {}).get(figure))
                for validation in row.validations
            ]
            lines.append(_thinned([(step, value) for step, value in points if value is not None and value > above]))
        if all(lines):
            found.append(Series(one.label, one.style, lines))
    return found


def _metric(run: Run, name: str) -> list[Point]:
    """A figure of metrics.jsonl by steps."""
    return [(line["step"], line[name]) for line in run.metrics if name in line]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """As many points as can be seen, each the mean of those that it stands for; the last is the last one's step."""
    size = math.ceil(len(points) / _MOST_POINTS)
    runs = [points[at : at + size] for at in range(0, len(points), size or 1)]
    return [(run[-1][0], mean([value for _, value in run])) for run in runs]


def _last_drift(run: Run) -> list[Point]:
    """By layer, from 1: how far its base stream has turned away."""
    measured = (one for one in reversed(run.metrics) if any(name.startswith(_COSINE) for name in one))
    line: Mapping[str, float] = next(measured, {})
    cosines = {int(name.removeprefix(_COSINE)): line[name] for name in line if name.startswith(_COSINE)}
    return [(layer + 1.0, 1 - cosine) for layer, cosine in sorted(cosines.items())]
