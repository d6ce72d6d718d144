"""The performance figures of a run: their sums, units and documentation."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.model.from_hf import open_base
from pipeline.observers.metrics import worded
from pipeline.sizing.flops import mfu_per_token_rate
from tests.distributed import run_ranks
from tests.training.runs import make_run, train

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
IN_A_STEP = ("data", "forward", "backward", "step", "communication")
EVENTS = {"zero": 1, "schedule__steps": 4, "validation__every_steps": 2, "checkpoints__every_steps": 3}


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def observed(tokens, tmp_path_factory):
    """A run with `peak_tflops`: its configuration and its figures."""
    run = tmp_path_factory.mktemp("observed")
    config = make_run(run, tokens, metrics__peak_tflops=0.25, **EVENTS)
    assert run_ranks(train, 2, config) == [0, 0]
    return config, lines_of(run)


def test_speed_time_and_memory_are_in_their_units(observed):
    config, lines = observed
    run = load_config(config)
    rate = mfu_per_token_rate(run, open_base(run.base).spec, 0.25e12)
    for line in lines:
        assert 0.05 < line["memory_peak_resident_gib"] < 50
        assert line["restarts"] == 0
        if line["step"] > 0:
            assert line["mfu"] == pytest.approx(line["tokens_per_second_per_gpu"] * rate)
            assert all(line[f"seconds/{phase}"] > 0 for phase in IN_A_STEP)
    seconds = sum(sum(line[f"seconds/{phase}"] for phase in IN_A_STEP) for line in lines[1:])
    steps_s = json.loads((config.parent / "training.json").read_text())["seconds"]
    assert seconds <= steps_s + 1e-3 <= seconds + sum(line["seconds/other"] for line in lines) + 2e-3


def test_every_figure_is_in_the_table(observed):
    named = re.findall(r"^\| `([^`]+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [re.sub("<[^>]+>", "[^/]+", name) for name in named]
    for name in {name for line in observed[1] for name in line}:
        assert any(re.fullmatch(pattern, name) for pattern in patterns), f"{name} is not in {TABLE.name}"


def test_a_resumed_run_counts_its_restarts(tokens, tmp_path):
    config = make_run(tmp_path, tokens, schedule__steps=3, zero=1)
    assert run_ranks(_two_attempts, 1, config) == [[75, 0]]
    assert [line["restarts"] for line in lines_of(tmp_path)] == [0, 0, 1, 1]


def _two_attempts(config):
    codes = []
    for attempt in ("here.0", "here.1"):
        os.environ["ATTEMPT"] = attempt
        codes.append(train(config, stop=attempt == "here.0"))
    return codes


def test_a_progress_line_has_the_main_figures():
    figures = {"loss": 2.5, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second_per_gpu": 12345.6}
    assert worded(figures) == ["loss 2.5000", "learning rate 1.00e-03", "12,346 tokens/s per rank"]
    on_a_gpu = worded({**figures, "memory_peak_allocated_gib": 1.0})
    assert on_a_gpu == ["loss 2.5000", "learning rate 1.00e-03", "12,346 tokens/s per GPU"]
    assert worded(figures | {"mfu": 0.4123})[-1] == "MFU 41.2%"
