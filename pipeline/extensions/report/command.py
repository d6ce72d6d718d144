"""Writes the page of a run: curves, gate, texts and costs, for a browser.

    scale-cpt report runs/demo                          writes runs/demo/report.html
    scale-cpt report runs/demo --output demo.html --svg figures

The run may be finished, at work, or have just begun: the page has what its folder holds. It is one
HTML file without scripts, which loads nothing from a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import log
from pipeline.config.sources import read_settings
from pipeline.errors import ConfigError, MissingPackageError

_PAGE = "report.html"
_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run's folder, such as runs/demo, or its YAML file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {_PAGE} in the run's folder)",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="DIR", help="also write the figures there, as SVG files"
    )


def main(arguments: argparse.Namespace) -> None:
    folder = _folder_of(arguments.run)
    _logger.info("%s: loading the libraries, then reading the run", folder)
    try:
        import matplotlib  # noqa: F401  # the figures of the page need it
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"report: {error.name} is not installed; pip install 'scale-cpt[report]'"
        ) from None
    from pipeline.extensions.report.recorded_run import read_run
    from pipeline.extensions.report.run_page import run_page, write_figures
    from pipeline.files.publishing import make_parent, write_text

    run = read_run(folder)
    output = arguments.output or folder / _PAGE
    make_parent(output)
    write_text(output, run_page(run))
    print(output)
    if arguments.svg is not None:
        for path in write_figures(run, arguments.svg):
            print(path)


def _folder_of(run: Path) -> Path:
    """The folder of a run, which a YAML file names.

    Raises:
        ConfigError: the file names none.
    """
    if not run.is_file():
        return run
    folder = read_settings(run).get("folder")
    if not isinstance(folder, str):
        raise ConfigError(f"{run}: expected the run's `folder`, found {folder!r}; name the folder")
    return Path(folder)
