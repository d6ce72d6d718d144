"""The figures as PNG, for documents that cannot hold a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import MissingPackageError
from pipeline.files import published_file
from pipeline.report.figures import figures_of
from pipeline.report.groups import overview
from pipeline.report.page import WIDE, style_sheet
from pipeline.report.rows import Run

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
    for figure in figures_of(overview(runs)):
        drawing = figure.draw(WIDE).markup(style_sheet(picture=True))
        with published_file(folder / f"{figure.name}.png") as file:
            file.write(bytes(resvg_py.svg_to_bytes(svg_string=drawing, zoom=_PIXELS_PER_CSS_PIXEL)))
        written.append(folder / f"{figure.name}.png")
    return written
