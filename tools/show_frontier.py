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
    from pipeline.files import write_text
    from pipeline.studies import frontier  # --help does not wait for torch
    from pipeline.studies.report.frontier import frontier_picture
    from pipeline.studies.study import load_study
    from pipeline.studies.study_runs import StudyRuns

    study = load_study(arguments.study, arguments.data)
    rows = frontier.frontier_rows(StudyRuns(study, str(arguments.study)))
    print(frontier.frontier_table(rows), end="\n\n")
    for goal, holds in frontier.goals(rows).items():
        print(f"{'not decided' if holds is None else 'holds' if holds else 'does not hold'}: {goal}")
    if arguments.output:
        frontier.write_frontier(arguments.output, rows)
    if arguments.picture:
        write_text(arguments.picture, frontier_picture(frontier.points_of(rows)))


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
