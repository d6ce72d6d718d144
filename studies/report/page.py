"""The report as one HTML file, without scripts and without anything from other servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.files.publishing import write_text
from studies.report import style, svg, tables
from studies.report.drawing import Drawing
from studies.report.figures import plots_of
from studies.report.formats import listed
from studies.report.groups import Group, corpora, group, measure_of, on_frontier, parts
from studies.report.plots import Plot
from studies.report.results import Row

# CSS pixels: a column of text on a desktop, and a phone's width without margins. CSS shows the one
# that fits.
WIDE = 820.0
NARROW = 358.0
_TEMPLATES = Environment(
    loader=PackageLoader("studies.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)


def page(runs: Sequence[Row], title: str) -> str:
    """The report of `runs`, as HTML."""
    groups = group(runs)
    shown = parts(groups)
    # Where corpora are shown together, a second table has each of them.
    single: dict[str, list[str]] = {}
    for name in corpora(groups):
        single[name] = [name]
    marks: dict[int, Markup] = {}
    model_count = 0
    for own in groups:
        marks[own.style] = _mark(own.style)
        model_count += len(own.rows)
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        style_sheet=Markup(style_sheet()),
        sources=list(dict.fromkeys(run.source for run in runs)),
        model_count=model_count,
        method_count=len(groups),
        findings=findings(groups),
        figures=[_both_widths(plot) for plot in plots_of(groups)],
        marks=marks,
        results=tables.results(groups, shown),
        details=tables.results(groups, single) if shown != single else None,
        costs=tables.costs(groups),
        gate_texts=tables.gate_texts(groups),
    )


def write_figures(runs: Sequence[Row], folder: Path) -> list[Path]:
    """Writes every plot of the report as an SVG file; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for plot in plots_of(group(runs)):
        path = folder / f"{plot.name}.svg"
        write_figure(plot.draw(WIDE), path)
        paths.append(path)
    return paths


def write_figure(drawing: Drawing, path: Path) -> None:
    """Writes a drawing as an SVG file for light and dark pages."""
    write_text(path, svg.svg_file(drawing, style_sheet()))


def style_sheet() -> str:
    """The colours of light and dark pages as CSS variables, and the rules of figures."""
    return _TEMPLATES.get_template("figures.css").render(light=style.LIGHT, dark=style.DARK)


def findings(groups: Sequence[Group]) -> list[str]:
    """What the first figure shows, in sentences."""
    measure = measure_of(groups)
    placed = []
    for own in groups:
        place = own.standing(measure)
        if place is not None:
            placed.append((own.label, place))
    if len(placed) < 2:
        return []

    # Of equal ones `max` and `min` take the first, in the order of the study's file.
    most, at_most = max(placed, key=lambda pair: pair[1].learned)
    least, at_least = min(placed, key=lambda pair: pair[1].forgotten)
    best: list[str] = []
    for label, place in placed:
        if on_frontier(place, placed):
            best.append(label)
    sentences = [f"{most} learned most: {measure.noun} {measure.describe(at_most)}."]
    if least != most:
        sentences.append(f"{least} forgot least: {measure.noun} {measure.describe(at_least)}.")
    sentences.append(
        f"On the frontier, where no other both learned more and forgot less: {listed(best)}."
    )
    return sentences


def _both_widths(plot: Plot) -> tuple[Plot, Markup, Markup]:
    # Drawn twice, as text in an SVG that is scaled to a phone's width cannot be read.
    wide = plot.draw(WIDE)
    narrow = plot.draw(NARROW, f"{plot.name}-narrow")
    return plot, svg.inline_svg(wide), svg.inline_svg(narrow)


def _mark(style_number: int) -> Markup:
    """The mark of a method, for its row of a table."""
    drawing = Drawing(16, 16, f"mark-{style_number}")
    drawing.mark((8, 8), style_number)
    return svg.inline_svg(drawing)
