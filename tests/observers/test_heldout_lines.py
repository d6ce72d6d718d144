"""A validation is a line of the log: what the held-out figures were at first, and are now."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.checkpoint.position import Position
from pipeline.config.run import load_config
from pipeline.observers.heldout_lines import HeldoutLines
from pipeline.run_folder.metrics import readable
from pipeline.training.observer import StepEvent, ValidationEvent
from pipeline.training.validation import HeldoutScore, score_figures
from tests.training.runs import make_run, metrics, write_config

START = {"perplexity/korean": 16.6, "perplexity/english": 3.81, "seconds/data": 1.0}
TASKS = {"acc/copa": 0.5}


def line_of(
    caplog: pytest.LogCaptureFixture, folder: Path, english: float, **changes: Any
) -> logging.LogRecord:
    """The line of a validation after 100 steps, with this perplexity of the replayed corpus."""
    config = load_config(write_config(folder, folder, **changes))
    position = Position(
        step=100, initial_nll_per_token={"korean": math.log(16.6), "english": math.log(3.81)}
    )
    scores = {
        "korean": HeldoutScore(math.log(9.4), 1.0),
        "english": HeldoutScore(math.log(english), 1.0),
    }
    figures = {**score_figures(scores), "forgetting/english": english / 3.81 - 1}
    figures |= {"kl_from_base/english": 0.1, "acc/copa": 0.75}
    event = ValidationEvent(position, scores, figures)
    lines = HeldoutLines(config)
    caplog.clear()
    with caplog.at_level(logging.INFO, "pipeline"):
        lines.on_validation(event)
    (record,) = caplog.records
    return record


def test_each_corpus_and_task_stands_beside_its_figure_at_first(caplog, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(orjson.dumps({"step": 0, **START, **TASKS}) + b"\n")
    record = line_of(caplog, tmp_path, 3.9)
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "step 100: held-out perplexity: korean 9.40 (at first 16.60), english 3.90 (at first 3.81),"
        " acc/copa 0.750 (at first 0.500)"
    )


def test_the_figures_before_the_first_step_are_a_line_too(caplog, tmp_path):
    lines = HeldoutLines(load_config(write_config(tmp_path, tmp_path, gate={})))
    with caplog.at_level(logging.INFO, "pipeline"):
        lines.on_step(StepEvent(0, 0, None, {**START, **TASKS}))
        lines.on_step(StepEvent(1, 256, 0.1, {"loss": 3.0}))
    assert [record.getMessage() for record in caplog.records] == [
        "before the first step: held-out perplexity without the gate: korean 16.60, english 3.81, "
        "acc/copa 0.500"
    ]


@pytest.mark.parametrize("english", [19_550.0, math.inf, math.nan])
def test_much_that_is_forgotten_without_a_budget_is_a_warning(caplog, tmp_path, english):
    record = line_of(caplog, tmp_path, english)
    assert record.levelname == "WARNING"
    assert "; much of english is forgotten: forgetting.max_increase sets a limit" in (
        record.getMessage()
    )


def test_a_run_with_a_budget_warns_at_its_budget_alone(caplog, tmp_path):
    limit = {"forgetting": {"max_increase": 10.0}}
    assert line_of(caplog, tmp_path, 19.0, **limit).levelname == "INFO"


def test_training_logs_each_validation_once(tokens, tmp_path):
    """Not once a rank."""
    config = make_run(tmp_path, tokens, zero=1, schedule__steps=2, validation__every_steps=1)
    command = [sys.executable, "-m", "pipeline", "train", config, "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "held-out perplexity: " in line]
    assert [re.findall(r" I (before the first step|step \d): ", line) for line in lines] == [
        ["before the first step"],
        ["step 1"],
        ["step 2"],
    ]
    figures = metrics(tmp_path)
    first, *_, last = [readable(line["perplexity/korean"]) for line in figures]
    assert f"korean {last} (at first {first})" in lines[2]
