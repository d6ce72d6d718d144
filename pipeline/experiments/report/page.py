"""One HTML file that holds everything: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.errors import MissingPackageError
from pipeline.experiments.report.figures import figures_of, listed, new_and_kept
from pipeline.experiments.report.runs import Group, Run, corpora, group, measure_of, not_dominated, overview
from pipeline.experiments.report.svg import Drawing, readable
from pipeline.experiments.report.tables import beside, costs, each_corpus, results
from pipeline.files import published_file

# CSS pixels: a column of text on a desk, and a phone's width without its margins. CSS shows the one that fits.
WIDE, NARROW = 820.0, 358.0
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
_FIRST_VALUE = re.compile(r"(--[\w-]+):\s*([^;]+);")


def page(runs: Sequence[Run], title: str, others: Sequence[Run] = ()) -> str:
    """The report of `runs`, as HTML; `others` are those of one study elsewhere, to stand beside them in a table."""
    groups, whole = overview(runs), group(runs)
    environment = Environment(
        loader=PackageLoader("pipeline.experiments.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        title=title,
        style=Markup(style_sheet()),
        sources=list(dict.fromkeys(run.source for run in runs)),
        run_count=len(runs),
        method_count=len(groups),
        findings=findings(groups),
        figures=[
            {
                "name": one.name,
                "title": one.title,
                "caption": one.caption,
                "wide": Markup(one.draw(WIDE).markup()),
                "narrow": Markup(one.draw(NARROW, f"{one.name}-narrow").markup()),
            }
            for one in figures_of(groups)
        ],
        marks={one.style: Markup(_mark(one)) for one in groups},
        results=results(groups),
        details=each_corpus(whole) if corpora(whole) != corpora(groups) else None,
        beside=beside(groups, overview(others)) if others else None,
        costs=costs(groups),
    )
    return readable(text)


def findings(groups: Sequence[Group]) -> list[str]:
    """What the first picture shows, in sentences."""
    measure = measure_of(row for one in groups for row in one.rows)
    placed = [(group.label, place) for group in groups if (place := group.standing(measure))]
    if len(placed) < 2:
        return []
    names = new_and_kept(groups)
    most, at_most = max(placed, key=lambda one: one[1].learned)
    least, at_least = min(placed, key=lambda one: one[1].forgotten)
    told = [f"{most} learned most: {measure.noun} {measure.said(at_most, *names)}."]
    if least != most:
        told.append(f"{least} forgot least: {measure.noun} {measure.said(at_least, *names)}.")
    best = [label for label, _ in not_dominated(placed)]
    return [*told, f"On the frontier, where no other both learned more and forgot less: {listed(best)}."]


@cache
def style_sheet(*, picture: bool = False) -> str:
    """The style of the page; of a `picture` that of its figures alone, in light colours that need no variables."""
    text = (files("pipeline.experiments.report") / "templates" / "style.css").read_text(encoding="utf-8")
    figures, _, rest = text.partition("/* the page */")
    if not picture:
        return figures + rest
    colours = dict(reversed(_FIRST_VALUE.findall(figures)))
    return _VARIABLE.sub(lambda found: colours[found[1]], figures.partition("/* figures */")[2])


def _mark(one: Group) -> str:
    drawing = Drawing(f"mark-{one.style}", 16, 16)
    drawing.mark((8, 8), one.style)
    return drawing.markup()


# --- The figures as PNG, for documents that cannot hold a drawing ---------------------------------------------------

_PIXELS_PER_CSS_PIXEL = 2


def write_pngs(runs: Sequence[Run], folder: Path) -> list[Path]:
    """A file a figure in `folder`, by the figure's name; in light colours, at twice the size of the page's.

    Raises:
        MissingPackageError: what draws them is not installed.
    """
    try:
        import resvg_py  # an optional package
    except ImportError:
        raise MissingPackageError("resvg_py: not installed, --png needs it; pip install 'scale-cpt[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    # A node of a cluster often has no font, and words would be missing from the picture without a word of it.
    with as_file(files("pipeline.experiments.report") / "fonts") as fonts:
        for figure in figures_of(overview(runs)):
            drawing = figure.draw(WIDE).markup(style_sheet(picture=True))
            picture = resvg_py.svg_to_bytes(svg_string=drawing, zoom=_PIXELS_PER_CSS_PIXEL, font_dirs=[str(fonts)])
            with published_file(folder / f"{figure.name}.png") as file:
                file.write(bytes(picture))
            written.append(folder / f"{figure.name}.png")
    return written
