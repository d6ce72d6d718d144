"""The report as one HTML file without scripts and without anything from other servers; and its figures as PNG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.errors import MissingPackageError
from pipeline.files import published_file
from pipeline.run_folder.status import RunStatus
from pipeline.studies.report.figures import figures_of, listed, new_and_kept
from pipeline.studies.report.runs import Group, Run, corpora, group, measure_of, not_dominated, overview
from pipeline.studies.report.svg import Drawing, readable
from pipeline.studies.report.tables import comparison, costs, differences, each_corpus, progress, results, texts

# CSS pixels: a column of text on a desktop, and a phone's width without margins. CSS shows the one that fits.
WIDE, NARROW = 820.0, 358.0
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
_PIXELS_PER_CSS_PIXEL = 2  # of PNGs
_FIRST_VALUE = re.compile(r"(--[\w-]+):\s*([^;]+);")


def page(
    runs: Sequence[Run],
    title: str,
    others: Sequence[Run] = (),
    earlier: Sequence[Run] = (),
    unfinished: Sequence[RunStatus] = (),
    *,
    reload_s: float | None = None,
) -> str:
    """The report of `runs`, as HTML.

    A table compares them with `others`, the runs of another study, another with `earlier` runs on the same texts, and
    one shows how far `unfinished` ones are. With `reload_s` a browser loads the page again and again.
    """
    groups, whole = overview(runs), group(runs)
    environment = Environment(
        loader=PackageLoader("pipeline.studies.report"),
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
                "name": figure.name,
                "title": figure.title,
                "caption": figure.caption,
                "wide": Markup(figure.draw(WIDE).markup()),
                "narrow": Markup(figure.draw(NARROW, f"{figure.name}-narrow").markup()),
            }
            for figure in figures_of(groups)
        ],
        marks={own.style: Markup(_mark(own.style)) for own in groups},
        results=results(groups),
        details=each_corpus(whole) if corpora(whole) != corpora(groups) else None,
        beside=comparison(groups, overview(others)) if others else None,
        differences=differences(groups, group(earlier)) if earlier else None,
        texts=texts(groups),
        progress=progress(unfinished) if unfinished else None,
        reload_s=reload_s,
        costs=costs(groups),
    )
    return readable(text)


def findings(groups: Sequence[Group]) -> list[str]:
    """What the first figure shows, in sentences."""
    measure = measure_of(row for own in groups for row in own.rows)
    placed = [(own.label, place) for own in groups if (place := own.standing(measure))]
    if len(placed) < 2:
        return []
    names = new_and_kept(groups)
    most, at_most = max(placed, key=lambda pair: pair[1].learned)
    least, at_least = min(placed, key=lambda pair: pair[1].forgotten)
    sentences = [f"{most} learned most: {measure.noun} {measure.describe(at_most, *names)}."]
    if least != most:
        sentences.append(f"{least} forgot least: {measure.noun} {measure.describe(at_least, *names)}.")
    best = [label for label, _ in not_dominated(placed)]
    return [*sentences, f"On the frontier, where no other both learned more and forgot less: {listed(best)}."]


@cache
def style_sheet(*, figures_only: bool = False, light: bool = False) -> str:
    """The style sheet of the page; or only the figures' part, for an SVG file; or that in `light` colours only."""
    text = (files("pipeline.studies.report") / "templates" / "style.css").read_text(encoding="utf-8")
    figures, _, rest = text.partition("/* the page */")
    if not light:
        return figures if figures_only else figures + rest
    colours = dict(reversed(_FIRST_VALUE.findall(figures)))
    return _VARIABLE.sub(lambda found: colours[found[1]], figures.partition("/* figures */")[2])


def _mark(style: int) -> str:
    drawing = Drawing(f"mark-{style}", 16, 16)
    drawing.mark((8, 8), style)
    return drawing.markup()


def write_pngs(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Writes one PNG per figure into `folder`, in light colours, at twice the page's size; returns their paths.

    Raises:
        MissingPackageError: resvg_py is not installed.
    """
    try:
        import resvg_py  # an optional package
    except ImportError:
        raise MissingPackageError("resvg_py: not installed, --png needs it; pip install 'scale-cpt[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    # Cluster nodes often have no fonts, and resvg would leave out the text without a warning.
    with as_file(files("pipeline.studies.report") / "fonts") as fonts:
        for figure in figures_of(overview(runs)):
            drawing = figure.draw(WIDE).markup(style_sheet(light=True))
            picture = resvg_py.svg_to_bytes(svg_string=drawing, zoom=_PIXELS_PER_CSS_PIXEL, font_dirs=[str(fonts)])
            with published_file(folder / f"{figure.name}.png") as file:
                file.write(bytes(picture))
            written.append(folder / f"{figure.name}.png")
    return written
