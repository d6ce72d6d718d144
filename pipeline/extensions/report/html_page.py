"""A page as one HTML file, without scripts and without anything from other servers.

Every text is escaped where it is inserted: what a model wrote, or a corpus is called, is never
HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.extensions.report.figures import style, svg
from pipeline.extensions.report.figures.drawing import Drawing
from pipeline.extensions.report.figures.plots import Plot
from pipeline.extensions.report.tables import Table
from pipeline.files.publishing import write_text

# CSS pixels: a column of text on a desktop, and a phone's width without margins. CSS shows the one
# that fits.
WIDE = 820.0
NARROW = 358.0
_TEMPLATES = Environment(
    loader=PackageLoader("pipeline.extensions.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)


@dataclass(frozen=True)
class FigureSection:
    """A section with a plot, which has its title and its caption."""

    plot: Plot
    kind = "figure"

    @property
    def drawings(self) -> tuple[Markup, Markup]:
        """The plot for a desktop and for a phone.

        It is drawn twice, as text in an SVG that is scaled to a phone's width cannot be read.
        """
        wide = self.plot.draw(WIDE)
        narrow = self.plot.draw(NARROW, f"{self.plot.name}-narrow")
        return svg.inline_svg(wide), svg.inline_svg(narrow)


@dataclass(frozen=True)
class TableSection:
    """A section with a table.

    Attributes:
        name: its id on the page.
        after: a paragraph behind the table.
    """

    name: str
    title: str
    table: Table
    note: str = ""
    after: str = ""
    kind = "table"


@dataclass(frozen=True)
class WrittenText:
    """How a model continues a prompt: before training, at the end, and between them by heading."""

    prompt: str
    before: str
    after: str
    between: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class TextSection:
    """A section with texts side by side.

    Attributes:
        headings: of the two columns.
    """

    name: str
    title: str
    note: str
    headings: tuple[str, str]
    texts: Sequence[WrittenText]
    kind = "texts"


Section = FigureSection | TableSection | TextSection


def html_page(
    title: str, source: str, findings: Sequence[str], sections: Sequence[Section], footer: str
) -> str:
    """The page.

    Args:
        source: a line under the title: what the page is about, and where that is.
        findings: the most important sentences, which a reader sees first.
    """
    marks: dict[int, Markup] = {}
    for section in sections:
        if isinstance(section, TableSection):
            for row in section.table.rows:
                if row.style is not None and row.style not in marks:
                    marks[row.style] = _mark(row.style)
    text = _TEMPLATES.get_template("page.html").render(
        title=title,
        style_sheet=Markup(style_sheet()),
        source=source,
        findings=findings,
        sections=sections,
        marks=marks,
        footer=footer,
    )
    # The name of a folder may be no UTF-8.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def write_figure(drawing: Drawing, path: Path) -> None:
    """Writes a drawing as an SVG file for light and dark pages."""
    write_text(path, svg.svg_file(drawing, style_sheet()))


def style_sheet() -> str:
    """The colours of light and dark pages as CSS variables, and the rules of figures."""
    return _TEMPLATES.get_template("figures.css").render(light=style.LIGHT, dark=style.DARK)


def _mark(style_number: int) -> Markup:
    """The mark of a method, for its row of a table."""
    drawing = Drawing(16, 16, f"mark-{style_number}")
    drawing.mark((8, 8), style_number)
    return svg.inline_svg(drawing)
