"""Prints the tables of a finished study of biographies.

They show how well Task 0 is still answered while Task 1 is learned.

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
from pipeline.run_folder.metrics import Figures, ValidationRecord, mean
from studies.report.groups import group
from studies.report.results import SUMMARY, Row, read_rows

ATTRIBUTES = ("birthday", "birth_city", "university", "major", "company", "company_city")
TASKS = {"task0": "Task 0", "task1": "Task 1"}
OWN_ATTRIBUTES = ATTRIBUTES[:-1]
"""All but the company's city, which follows from the company and is reported separately."""
HARD = "first_token_accuracy"
SOFT = "first_token_probability"
EXACT = "exact_match"


def read_summary(study: Path) -> list[Row]:
    """The rows of a finished study's summary.json.

    Raises:
        RunFolderError: the study is not finished.
        DataError: it is not a study of biographies.
    """
    rows = read_rows(study)
    for task in TASKS:
        for attribute in ATTRIBUTES:
            corpus = f"{task}_{attribute}"
            if corpus not in rows[0].roles:
                raise DataError(
                    f"{study / SUMMARY}: expected the corpora of a study of biographies, found "
                    f"none called {corpus}; give the folder of a study of "
                    "studies/configs/biography*.yaml"
                )
    return rows


def rates_table(rows: Sequence[Row]) -> str:
    """Both tasks at the end, at each learning rate, chosen or not, with the first seed."""
    lines: list[list[str]] = []
    for row in rows:
        if row.seed != rows[0].seed:
            # The other seeds have the chosen rate alone.
            continue
        if row.after:
            ends = [f"{mean_figure(row.after, task):.1%}" for task in TASKS]
        else:
            ends = ["diverged", ""]
        lines.append([row.label, f"{row.learning_rate:g}", *ends])
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
    """Task 0 where Task 1 first reaches `learned`.

    This compares methods that learn at different speeds. Means are over the seeds that reach it;
    where not all do, their number is in the last column.
    """
    header = [f"Where Task 1 reaches {learned:.0%}, hard", "step", "Task 1", "Task 0", ""]
    lines: list[list[str]] = []
    for own in group(rows):
        reached: list[ValidationRecord] = []
        for row in own.rows:
            first = _first_learned(row, learned)
            if first is not None:
                reached.append(first)
        if not reached:
            lines.append([own.label, "never", "", "", ""])
            continue
        steps: list[float] = []
        task0: list[float] = []
        task1: list[float] = []
        for validation in reached:
            steps.append(validation.step)
            task0.append(mean_figure(validation.figures, "task0"))
            task1.append(mean_figure(validation.figures, "task1"))
        some = ""
        if len(reached) < len(own.rows):
            some = f"{len(reached)} of {len(own.rows)} seeds"
        means = [f"{mean(steps):.0f}", f"{mean(task1):.1%}", f"{mean(task0):.1%}"]
        lines.append([own.label, *means, some])
    return table(header, lines)


def _first_learned(row: Row, learned: float) -> ValidationRecord | None:
    """The first validation at which Task 1 reaches `learned`."""
    # Validations are some steps apart: Task 1 may be well above `learned` by then.
    for validation in row.validations:
        if mean_figure(validation.figures, "task1") >= learned:
            return validation
    return None


def _end_line(own: Sequence[Row]) -> list[str]:
    # What is trained, and at which rate, is the same for all seeds.
    first = own[0]
    cells = [first.label, cell(first.trainable_parameters, ","), cell(first.learning_rate, "g")]
    for task in TASKS:
        hard: list[float] = []
        before: list[float] = []
        soft: list[float] = []
        exact: list[float] = []
        city: list[float] = []
        for row in own:
            hard.append(mean_figure(row.after, task))
            before.append(mean_figure(row.before, task))
            soft.append(mean_figure(row.after, task, SOFT))
            exact.append(mean_figure(row.after, task, EXACT))
            city.append(mean_figure(row.after, task, attributes=ATTRIBUTES[-1:]))
        cells.append(over_seeds(hard, "{:.1%}".format))
        for values in (before, soft, exact, city):
            cells.append(f"{mean(values):.1%}")
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
