"""Prints the tables of a finished study of biographies: how well Task 0 is still answered while Task 1 is learned.

    python -m studies.biographies.show runs/biography

`python -m studies report` draws the course of both tasks, and has a table of every attribute.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline import command_line
from pipeline.errors import DataError
from pipeline.evaluation.table import cell, over_seeds, table
from pipeline.run_folder.metrics import Figures, mean
from studies.report.groups import group
from studies.report.results import SUMMARY, Row, read_rows

ATTRIBUTES = ("birthday", "birth_city", "university", "major", "company", "company_city")
TASKS = {"task0": "Task 0", "task1": "Task 1"}
OWN_ATTRIBUTES = ATTRIBUTES[:-1]
"""All but the company's city, which follows from the company and is reported separately."""
HARD, SOFT, EXACT = "first_token_accuracy", "first_token_probability", "exact_match"


def read_summary(study: Path) -> list[Row]:
    """The rows of a finished study's summary.json.

    Raises:
        RunFolderError: the study is not finished.
        DataError: it is not a study of biographies.
    """
    rows = read_rows(study)
    wanted = {f"{task}_{attribute}" for task in TASKS for attribute in ATTRIBUTES}
    if missing := sorted(wanted - rows[0].roles.keys()):
        raise DataError(
            f"{study / SUMMARY}: expected the corpora of a study of biographies, found none called {missing[0]}; give "
            "the folder of a study of studies/configs/biography*.yaml"
        )
    return rows


def rates_table(rows: Sequence[Row]) -> str:
    """Both tasks at the end of the run at each learning rate, chosen or not, with the first seed."""
    lines = []
    for row in (row for row in rows if row.seed == rows[0].seed):
        known = (
            [f"{mean_figure(row.after, task):.1%}" for task in TASKS]
            if row.after
            else ["diverged", ""]
        )
        lines.append([row.label, f"{row.learning_rate:g}", *known])
    return table(["Each rate, hard", "learning rate", *TASKS.values()], lines)


def mean_figure(
    figures: Figures, task: str, name: str = HARD, attributes: Iterable[str] = OWN_ATTRIBUTES
) -> float:
    """The mean of a figure of a task over attributes."""
    return mean([figures[f"{task}_{attribute}"][name] for attribute in attributes])


def end_table(rows: Sequence[Row]) -> str:
    """Both tasks at the end: means over seeds, hard figures with one standard deviation."""
    header = ["", "trained", "learning rate"]
    for title in TASKS.values():
        header += [f"{title}: hard", "before", "soft", "exact match", "company's city"]
    return table(header, [_end_line(own.rows) for own in group(rows)])


def matched_table(rows: Sequence[Row], learned: float = 0.9) -> str:
    """Task 0 where Task 1 first reaches `learned`, which compares methods that learn at different speeds.

    Means over the seeds that reach it; where not all do, their number is in the last column.
    """
    header = [f"Where Task 1 reaches {learned:.0%}, hard", "step", "Task 1", "Task 0", ""]
    lines = []
    for own in group(rows):
        reached = [first for row in own.rows if (first := _first_learned(row, learned)) is not None]
        if reached:
            steps, task1, task0 = (mean(column) for column in zip(*reached, strict=True))
            some = (
                f"{len(reached)} of {len(own.rows)} seeds" if len(reached) < len(own.rows) else ""
            )
            lines.append([own.label, f"{steps:.0f}", f"{task1:.1%}", f"{task0:.1%}", some])
        else:
            lines.append([own.label, "never", "", "", ""])
    return table(header, lines)


def _first_learned(row: Row, learned: float) -> tuple[int, float, float] | None:
    """The first validation at which Task 1 reaches `learned`: its step, and both tasks' figures."""
    for validation in row.validations:
        task1 = mean_figure(validation.figures, "task1")
        if task1 >= learned:
            return validation.step, task1, mean_figure(validation.figures, "task0")
    return None


def _end_line(own: Sequence[Row]) -> list[str]:
    first = own[0]
    cells = [first.label, cell(first.trainable_parameters, ","), cell(first.learning_rate, "g")]
    for task in TASKS:
        ends = [row.after for row in own]
        others = (
            [mean_figure(row.before, task) for row in own],
            [mean_figure(figures, task, SOFT) for figures in ends],
            [mean_figure(figures, task, EXACT) for figures in ends],
            [mean_figure(figures, task, attributes=ATTRIBUTES[-1:]) for figures in ends],
        )
        cells.append(over_seeds([mean_figure(figures, task) for figures in ends], "{:.1%}".format))
        cells += [f"{mean(values):.1%}" for values in others]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", type=Path, help="the study's folder, the `folder` of its YAML file"
    )
    rows = read_summary(parser.parse_args().study)
    print(end_table(rows), matched_table(rows), rates_table(rows), sep="\n\n")


if __name__ == "__main__":
    command_line.run(main)
