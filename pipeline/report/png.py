"""The figures as PNG, for documents that cannot hold a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
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
    # A node of a cluster often has no font, and words would be missing from the picture without a word of it.
    with as_file(files("pipeline.report") / "fonts") as fonts:
        for figure in figures_of(overview(runs)):
            drawing = figure.draw(WIDE).markup(style_sheet(picture=True))
            picture = resvg_py.svg_to_bytes(svg_string=drawing, zoom=_PIXELS_PER_CSS_PIXEL, font_dirs=[str(fonts)])
            with published_file(folder / f"{figure.name}.png") as file:
                file.write(bytes(picture))
            written.append(folder / f"{figure.name}.png")
    return written
