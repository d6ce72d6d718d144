"""Prints the tables of a finished study of biographies: both tasks, and Task 0 over time.

    scale-cpt show-biographies runs/biography

The study's folder is the `folder` of its YAML file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="the study's folder")


def main(arguments: argparse.Namespace) -> None:
    from pipeline.experiments import biography_results as results  # --help does not wait for torch

    rows = results.read_summary(arguments.study)
    tables = [results.end_table(rows), results.matched_table(rows), results.rates_table(arguments.study)]
    tables += [results.course_table(rows), *(results.attribute_table(rows, task) for task in results.TASKS)]
    print(*tables, sep="\n\n")


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
