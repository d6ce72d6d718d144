"""Prints what a finished study of biographies showed: both tasks at the end, and Task 0 while Task 1 was learned.

python tools/show_biographies.py runs/biography
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.biography.results import (
    TASKS,
    attribute_table,
    course_table,
    end_table,
    matched_table,
    rates_table,
    read_summary,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study's folder")
    study = parser.parse_args().study
    rows = read_summary(study)
    by_attribute = (attribute_table(rows, task) for task in TASKS)
    print(end_table(rows), matched_table(rows), rates_table(study), course_table(rows), *by_attribute, sep="\n\n")


if __name__ == "__main__":
    command_line.run(main)
