"""The tables of a study of biographies, from a summary as the study writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DataError, RunFolderError
from pipeline.experiments.biography import ATTRIBUTES
from pipeline.experiments.biography_results import (
    TASKS,
    attribute_table,
    course_table,
    end_table,
    matched_table,
    rates_table,
    read_summary,
)
from tests.experiments.studies import call_tool


def figures(task0: float, task1: float) -> dict[str, dict[str, float]]:
    """The company's city is fully known; the other five have these shares on average."""
    found = {}
    for task, known in (("task0", task0), ("task1", task1)):
        for at, attribute in enumerate(ATTRIBUTES):
            share = 1.0 if attribute == "company_city" else known + 0.01 * (at - 2)
            found[f"{task}_{attribute}"] = {
                "perplexity": 2.0,
                "first_token_accuracy": share,
                "first_token_probability": share / 2,
                "exact_match": share / 4,
            }
    return found


def row(label: str, seed: int, at_end: float) -> dict[str, Any]:
    return {
        "label": label,
        "seed": seed,
        "learning_rate": 3e-3,
        "trainable_parameters": 1234567,
        "steps": 40,
        "roles": {name: "replay" if name.startswith("task0") else "new" for name in figures(0, 0)},
        "before": figures(0.9, 0.1),
        "during": [{"step": step, "figures": figures(0.9 - step / 100, 0.5)} for step in (10, 20, 30)],
        "after": figures(at_end, 0.8),
    }


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    rows = [row("Full fine-tuning", 1, 0.1), row("Full fine-tuning", 2, 0.2), row("SCALE-Route", 1, 0.7)]
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    tried = [
        {
            "label": "LoRA",
            "learning_rate": rate,
            "after": figures(0.5, rate),
            "chosen": rate == 0.5,
            "at_the_edge": False,
        }
        for rate in (0.25, 0.5)
    ]
    (tmp_path / "learning_rates.json").write_text(json.dumps(tried))
    return tmp_path


def cells(text: str) -> list[list[str]]:
    """The figures of each line, behind its label."""
    return [[line.split("  ")[0], *re.split(r"  +", line)[1:]] for line in text.splitlines()]


def test_the_end_is_the_mean_over_seeds_and_the_companys_city_is_separate(summary: Path):
    _, _, fft, route = cells(end_table(read_summary(summary)))
    task1 = ["80.0% ±0.0%", "10.0%", "40.0%", "20.0%", "100.0%"]
    assert fft == ["Full fine-tuning", "1,234,567", "0.003", "15.0% ±7.1%", "90.0%", "7.5%", "3.8%", "100.0%", *task1]
    assert route[3:5] == ["70.0%", "90.0%"]


def test_the_course_of_task_0_from_before_the_first_step_to_the_last(summary: Path):
    rows = read_summary(summary)
    header, _, fft, route = cells(course_table(rows))
    assert header == ["Task 0, hard, after step", "0", "10", "20", "30", "40"]
    assert fft[1:] == ["90.0%", "80.0%", "70.0%", "60.0%", "15.0%"]
    assert route[-1] == "70.0%"
    header, _, fft, _ = cells(course_table(rows, columns=2))
    assert header[1:] == ["0", "30", "40"]
    assert fft[1:] == ["90.0%", "60.0%", "15.0%"]


def test_task_0_where_task_1_is_known_as_well(summary: Path):
    rows = read_summary(summary)
    _, _, fft, route = cells(matched_table(rows, learned=0.5))
    assert fft == ["Full fine-tuning", "10", "50.0%", "80.0%"]
    assert route[1:] == ["10", "50.0%", "80.0%"]
    assert cells(matched_table(rows))[-1] == ["SCALE-Route", "never"]


def test_seeds_that_do_not_reach_it_are_counted(summary: Path):
    rows = read_summary(summary)
    slower = rows[1].model_copy(update={"during": [], "after": figures(0.2, 0.4)})
    assert cells(matched_table([rows[0], slower], learned=0.5))[-1] == [
        "Full fine-tuning", "10", "50.0%", "80.0%", "1 of 2 seeds"
    ]  # fmt: skip


def test_rates_that_were_not_chosen(summary: Path):
    _, _, *lines = cells(rates_table(summary))
    assert lines == [["LoRA", "0.25", "50.0%", "25.0%"], ["LoRA", "0.5", "50.0%", "50.0%"]]


def test_every_attribute_by_itself(summary: Path):
    rows = read_summary(summary)
    _, _, fft, _ = cells(attribute_table(rows, "task0"))
    assert fft[1:] == ["13.0%", "14.0%", "15.0%", "16.0%", "17.0%", "100.0%"]
    assert all(TASKS[task] in attribute_table(rows, task) for task in TASKS)


def test_the_command_line_prints_all_tables(summary: Path, monkeypatch, capsys):
    call_tool(monkeypatch, "show_biographies", summary)
    printed = capsys.readouterr().out
    rows = read_summary(summary)
    tables = [end_table(rows), matched_table(rows), rates_table(summary), course_table(rows)]
    assert all(text in printed for text in [*tables, *(attribute_table(rows, task) for task in TASKS)])


def test_another_study_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match=r"summary\.json: no such file"):
        read_summary(tmp_path)
    other = {"label": "LoRA", "steps": 1, "roles": {"korean": "new"}, "before": {}, "after": {}}
    (tmp_path / "summary.json").write_text(json.dumps([other]))
    with pytest.raises(DataError, match="expected the corpora of a study of biographies, found none called task0_"):
        read_summary(tmp_path)
    (tmp_path / "learning_rates.json").write_text(json.dumps([{**other, "learning_rate": 1, "chosen": True}]))
    with pytest.raises(RunFolderError, match=r"learning_rates\.json: row 0: at_the_edge: Field required"):
        rates_table(tmp_path)
