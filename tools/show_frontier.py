"""Prints what each run of a study learned and forgot, with and without its gate.

    scale-cpt frontier configs/studies/frontier_quick.yaml --output runs/frontier/summary.json
    scale-cpt frontier configs/studies/frontier_quick.yaml --picture frontier.svg

The file of --output has a row for each run and seed, one for each gated model, and one for the base.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="its YAML file")
    parser.add_argument("--data", type=Path, default="data", help="the folder of the texts (default: data)")
    parser.add_argument("--output", type=Path, help="write the rows to this file, as JSON")
    parser.add_argument("--picture", type=Path, help="draw them into this file, as SVG")


def main(arguments: argparse.Namespace) -> None:
    from pipeline.files import write_json, write_text
    from pipeline.studies.frontier import frontier_picture, frontier_rows, frontier_table  # --help needs no torch
    from pipeline.studies.report.page import svg_file
    from pipeline.studies.runs import StudyRuns
    from pipeline.studies.study import load_study

    rows = frontier_rows(StudyRuns(load_study(arguments.study, arguments.data), str(arguments.study)))
    print(frontier_table(rows))
    if arguments.output:
        write_json(arguments.output, [row.values() for row in rows])
    if arguments.picture:
        write_text(arguments.picture, svg_file(frontier_picture(rows)))


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
