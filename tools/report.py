"""Writes one HTML page that shows what runs learned and forgot: figures, tables, costs.

    scale-cpt report runs/korean --output report.html
    scale-cpt report runs/demo runs/demo-fft --output report.html --svg figures

A RUN is a study's folder, with its summary.json, or a run's folder, with its metrics.jsonl; the run may still train.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of studies or runs"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )
    parser.add_argument(
        "--title", default="What was learned, what was forgotten", help="the page's heading"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help="also write the figures there, as SVG files"
    )


def main(arguments: argparse.Namespace) -> None:
    from pipeline.files import write_text  # --help waits for none of these
    from pipeline.studies.report.figures import figures_of
    from pipeline.studies.report.page import WIDE, page, svg_file
    from pipeline.studies.report.runs import group
    from pipeline.studies.results import read_runs

    runs = read_runs(arguments.runs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output, page(runs, arguments.title))
    print(arguments.output)
    if arguments.svg:
        arguments.svg.mkdir(parents=True, exist_ok=True)
        for figure in figures_of(group(runs)):
            write_text(arguments.svg / f"{figure.name}.svg", svg_file(figure.draw(WIDE)))
            print(arguments.svg / f"{figure.name}.svg")


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
