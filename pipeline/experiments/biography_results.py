"""What a study of biographies showed: how well Task 0 is still answered while Task 1 is learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import DataError
from pipeline.evaluation.table import cell, over_seeds, table
from pipeline.experiments.biography import ATTRIBUTES
from pipeline.experiments.results import LEARNING_RATES, SUMMARY, Row, read_rows, read_tried
from pipeline.run_folder.metrics import Figures, mean

TASKS = {"task0": "Task 0", "task1": "Task 1"}
OWN_ATTRIBUTES = ATTRIBUTES[:-1]
"""Those that tell something new of a person: the company's city follows from the company, and is told apart."""
HARD, SOFT, EXACT = "first_token_accuracy", "first_token_probability", "exact_match"


def read_summary(study: Path) -> list[Row]:
    """The rows of a finished study's summary.json.

    Raises:
        RunFolderError: the study is not finished.
        DataError: it is none of biographies.
    """
    rows = read_rows(study)
    for number, row in enumerate(rows):
        for validation in row.validations:
            _check_asked(validation.figures, f"{study / SUMMARY}: row {number}, step {validation.step}")
    return rows


def rates_table(study: Path) -> str:
    """Both tasks at the end of each run of the grids, the learning rates that were not chosen among them.

    Raises:
        RunFolderError, DataError: as `read_summary`.
    """
    lines = []
    for number, one in enumerate(read_tried(study)):
        known = ["diverged", ""]
        if not one.diverged:
            _check_asked(one.after, f"{study / LEARNING_RATES}: row {number}")
            known = [f"{mean_figure(one.after, task):.1%}" for task in TASKS]
        lines.append([one.label, f"{one.learning_rate:g}", *known])
    return table(["Each rate, hard", "learning rate", *TASKS.values()], lines)


def mean_figure(figures: Figures, task: str, name: str = HARD, attributes: Iterable[str] = OWN_ATTRIBUTES) -> float:
    """The mean of a task's figure over attributes."""
    return mean([figures[f"{task}_{attribute}"][name] for attribute in attributes])


def end_table(rows: Sequence[Row]) -> str:
    """What each method knows of both tasks at the end: means over seeds, hard figures with one standard deviation."""
    header = ["", "trained", "learning rate"]
    for title in TASKS.values():
        header += [f"{title}: hard", "before", "soft", "exact match", "company's city"]
    return table(header, [_end_line(own) for own in _by_label(rows).values()])


def course_table(rows: Sequence[Row], columns: int = 10) -> str:
    """Task 0's hard first-token accuracy at some of the steps of Task 1; means over seeds."""
    courses = {label: [_course(row) for row in own] for label, own in _by_label(rows).items()}
    steps = sorted(set.intersection(*(set(course) for own in courses.values() for course in own)))
    shown = steps[:: max(1, -(-len(steps) // columns))]
    shown = [*shown, *({steps[-1]} - set(shown))]
    lines = [[label, *(f"{mean([one[step] for one in own]):.1%}" for step in shown)] for label, own in courses.items()]
    return table(["Task 0, hard, after step", *map(str, shown)], lines)


def matched_table(rows: Sequence[Row], learned: float = 0.9) -> str:
    """Task 0 where Task 1 is first known so well, which sets methods side by side that learn at different speeds.

    Means over the seeds that come so far, whose number stands there where others do not.
    """
    header = [f"Where Task 1 reaches {learned:.0%}, hard", "step", "Task 1", "Task 0", ""]
    lines = []
    for label, own in _by_label(rows).items():
        reached = [first for row in own if (first := _first_learned(row, learned)) is not None]
        if reached:
            steps, task1, task0 = (mean(column) for column in zip(*reached, strict=True))
            some = f"{len(reached)} of {len(own)} seeds" if len(reached) < len(own) else ""
            lines.append([label, f"{steps:.0f}", f"{task1:.1%}", f"{task0:.1%}", some])
        else:
            lines.append([label, "never", "", "", ""])
    return table(header, lines)


def attribute_table(rows: Sequence[Row], task: str) -> str:
    """Hard first-token accuracy of each attribute at the end; means over seeds."""
    header = [f"{TASKS[task]}, hard, after", *(attribute.replace("_", " ") for attribute in ATTRIBUTES)]
    lines = []
    for label, own in _by_label(rows).items():
        figures = (mean([mean_figure(row.after, task, attributes=[one]) for row in own]) for one in ATTRIBUTES)
        lines.append([label, *(f"{value:.1%}" for value in figures)])
    return table(header, lines)


def _check_asked(figures: Figures, place: str) -> None:
    """Raises DataError where a question of the biographies was not asked; `place` says where the figures stand."""
    for corpus in (f"{task}_{attribute}" for task in TASKS for attribute in ATTRIBUTES):
        if not {HARD, SOFT, EXACT} <= figures.get(corpus, {}).keys():
            raise DataError(
                f"{place}: expected the corpora of a study of biographies, found none called {corpus} with answers; "
                "name the folder of a study of configs/studies/biography*.yaml"
            )


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row.label for row in rows)
    return {label: [row for row in rows if row.label == label] for label in labels}


def _course(row: Row) -> dict[int, float]:
    """Task 0's figure by step."""
    return {validation.step: mean_figure(validation.figures, "task0") for validation in row.validations}


def _first_learned(row: Row, learned: float) -> tuple[int, float, float] | None:
    """The first look at which Task 1 is known so well: its step, and both tasks' figures."""
    validations = row.validations
    known = ((one.step, mean_figure(one.figures, "task1"), mean_figure(one.figures, "task0")) for one in validations)
    return next((one for one in known if one[1] >= learned), None)


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
