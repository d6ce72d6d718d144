"""The report as one HTML file, and figures as SVG files: without scripts, and without anything from other servers."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from studies.report import tables
from studies.report.drawing import Drawing
from studies.report.figures import figures_of
from studies.report.formats import listed
from studies.report.groups import Group, corpora, group, measure_of, on_frontier, parts
from studies.report.results import Row

# CSS pixels: a column of text on a desktop, and a phone's width without margins. CSS shows the one that fits.
WIDE, NARROW = 820.0, 358.0
_MARGIN = 18.0  # of a figure in a file of its own
_TEMPLATES = Environment(
    loader=PackageLoader("studies.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)


def page(runs: Sequence[Row], title: str) -> str:
    """The report of `runs`, as HTML."""
    groups = group(runs)
    shown, single = parts(groups), {name: [name] for name in corpora(groups)}
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        sources=list(dict.fromkeys(run.source for run in runs)),
        model_count=sum(len(own.rows) for own in groups),
        method_count=len(groups),
        findings=findings(groups),
        figures=[
            (own, own.draw(WIDE), own.draw(NARROW, f"{own.name}-narrow"))
            for own in figures_of(groups)
        ],
        marks={own.style: _mark(own.style) for own in groups},
        results=tables.results(groups, shown),
        details=tables.results(groups, single) if shown != single else None,
        costs=tables.costs(groups),
    )


def findings(groups: Sequence[Group]) -> list[str]:
    """What the first figure shows, in sentences."""
    measure = measure_of(groups)
    placed = [(own.label, place) for own in groups if (place := own.standing(measure))]
    if len(placed) < 2:
        return []
    most, at_most = max(placed, key=lambda pair: pair[1].learned)
    least, at_least = min(placed, key=lambda pair: pair[1].forgotten)
    sentences = [f"{most} learned most: {measure.noun} {measure.describe(at_most)}."]
    if least != most:
        sentences.append(f"{least} forgot least: {measure.noun} {measure.describe(at_least)}.")
    best = [label for label, at in placed if on_frontier(at, placed)]
    return [
        *sentences,
        f"On the frontier, where no other both learned more and forgot less: {listed(best)}.",
    ]


def _mark(style: int) -> Drawing:
    drawing = Drawing(16, 16)
    drawing.mark((8, 8), style)
    return drawing


def svg_file(drawing: Drawing) -> str:
    """A drawing as an SVG file, for light and dark pages."""
    return _TEMPLATES.get_template("file.svg").render(drawing=drawing, margin=_MARGIN)
