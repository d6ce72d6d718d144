"""What a study of biographies showed: how well Task 0 is still answered while Task 1 is learned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.biography.people import ATTRIBUTES
from pipeline.errors import DataError
from pipeline.evaluation.table import table

Figures = Mapping[str, Mapping[str, float]]
"""By the corpus's name, `<task>_<attribute>`, then the figure's."""
Row = Mapping[str, Any]

TASKS = {"task0": "Task 0", "task1": "Task 1"}
OWN_ATTRIBUTES = ATTRIBUTES[:-1]
"""Those that tell something new of a person: the company's city follows from the company, and is told apart."""
HARD = "first_token_accuracy"


def read_summary(study: Path) -> list[Row]:
    """The rows of a finished study's summary.json.

    Raises:
        DataError: the study is not finished, or none of biographies.
    """
    path = study / "summary.json"
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; tools/run_study.py writes it when the study is finished") from None
    wanted = {f"{task}_{attribute}" for task in TASKS for attribute in ATTRIBUTES}
    if missing := sorted(wanted - set(rows[0]["after"])):
        raise DataError(f"{path}: expected the corpora of a study of biographies, found none called {missing[0]}")
    return rows


def rates_table(study: Path) -> str:
    """Both tasks at the end of each run of the grids, the learning rates that were not chosen among them."""
    tried: list[Row] = json.loads((study / "learning_rates.json").read_text(encoding="utf-8"))
    lines = [
        [one["label"], f"{one['learning_rate']:g}", *(f"{mean_figure(one['after'], task):.1%}" for task in TASKS)]
        for one in tried
    ]
    return table(["Each rate, hard", "learning rate", *TASKS.values()], lines)


def mean_figure(figures: Figures, task: str, name: str = HARD, attributes: Iterable[str] = OWN_ATTRIBUTES) -> float:
    """The mean of a task's figure over attributes."""
    return mean(figures[f"{task}_{attribute}"][name] for attribute in attributes)


def end_table(rows: Sequence[Row]) -> str:
    """What each method knows of both tasks at the end; means over seeds."""
    header = ["", "trained", "learning rate"]
    for title in TASKS.values():
        header += [f"{title}: hard", "before", "soft", "exact match", "company's city"]
    return table(header, [_end_line(own) for own in _by_label(rows).values()])


def course_table(rows: Sequence[Row], columns: int = 10) -> str:
    """Task 0's hard first-token accuracy at some of the steps of Task 1; means over seeds."""
    grouped = _by_label(rows)
    courses = {label: [_course(row) for row in own] for label, own in grouped.items()}
    steps = list(next(iter(courses.values()))[0])
    shown = steps[:: max(1, -(-len(steps) // columns))]
    shown = [*shown, *({steps[-1]} - set(shown))]
    lines = [[label, *(f"{mean(one[step] for one in own):.1%}" for step in shown)] for label, own in courses.items()]
    return table(["Task 0, hard, after step", *map(str, shown)], lines)


def matched_table(rows: Sequence[Row], learned: float = 0.9) -> str:
    """Task 0 where Task 1 is first known so well, which sets methods side by side that learn at different speeds.

    Means over the seeds that come so far.
    """
    header = [f"Where Task 1 reaches {learned:.0%}, hard", "step", "Task 1", "Task 0"]
    lines = []
    for label, own in _by_label(rows).items():
        reached = [first for row in own if (first := _first_learned(row, learned)) is not None]
        if reached:
            steps, task1, task0 = (mean(column) for column in zip(*reached, strict=True))
            lines.append([label, f"{steps:.0f}", f"{task1:.1%}", f"{task0:.1%}"])
        else:
            lines.append([label, "never", "", ""])
    return table(header, lines)


def _first_learned(row: Row, learned: float) -> tuple[int, float, float] | None:
    """The first look at which Task 1 is known so well: its step, and both tasks' figures."""
    known = ((step, mean_figure(figures, "task1"), mean_figure(figures, "task0")) for step, figures in _looks(row))
    return next((one for one in known if one[1] >= learned), None)


def attribute_table(rows: Sequence[Row], task: str, when: str = "after") -> str:
    """Hard first-token accuracy of each attribute; means over seeds."""
    header = [f"{TASKS[task]}, hard, {when}", *(attribute.replace("_", " ") for attribute in ATTRIBUTES)]
    lines = []
    for label, own in _by_label(rows).items():
        figures = (mean(mean_figure(row[when], task, attributes=[one]) for row in own) for one in ATTRIBUTES)
        lines.append([label, *(f"{value:.1%}" for value in figures)])
    return table(header, lines)


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row["label"] for row in rows)
    return {label: [row for row in rows if row["label"] == label] for label in labels}


def _course(row: Row) -> dict[int, float]:
    """Task 0's figure by step."""
    return {step: mean_figure(figures, "task0") for step, figures in _looks(row)}


def _looks(row: Row) -> list[tuple[int, Figures]]:
    """Every validation of a run, by step."""
    during = [(one["step"], one["figures"]) for one in row["during"]]
    return [(0, row["before"]), *during, (row["steps"], row["after"])]


def _end_line(own: Sequence[Row]) -> list[str]:
    first = own[0]
    cells = [first["label"], f"{first['trainable_parameters']:,}", f"{first['learning_rate']:g}"]
    for task in TASKS:
        values = (
            mean(mean_figure(row["after"], task) for row in own),
            mean(mean_figure(row["before"], task) for row in own),
            mean(mean_figure(row["after"], task, "first_token_probability") for row in own),
            mean(mean_figure(row["after"], task, "exact_match") for row in own),
            mean(mean_figure(row["after"], task, attributes=ATTRIBUTES[-1:]) for row in own),
        )
        cells += [f"{value:.1%}" for value in values]
    return cells
