"""The performance figures of a run: their sums, units and documentation."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.model.from_hf import open_base
from pipeline.observers.metrics import worded
from pipeline.sizing.flops import mfu_per_token_rate
from tests.distributed import run_ranks
from tests.training.runs import make_run, prepared, start_deepspeed, train

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
IN_A_STEP = ("data", "forward", "backward", "step", "communication")
EVENTS = {"zero": 1, "schedule__steps": 4, "validation__every_steps": 2, "checkpoints__every_steps": 3}
ROUNDING_S = 1e-6


def timed(config):
    """Trains; returns bounds on the loop's time, its part that is in no line yet, and the time of the steps."""
    start_deepspeed()
    from pipeline.training.launch import StopSignals
    from pipeline.training.loop import train as train_loop

    trainer, position, _ = prepared(config)
    before = time.perf_counter()
    trainer.phases.seconds()
    begin = time.perf_counter()
    outcome = train_loop(trainer, position, StopSignals())
    end = time.perf_counter()
    rest = trainer.phases.seconds()
    after = time.perf_counter()
    trainer.observers.on_end(finished=True)
    return end - begin, after - before, rest, outcome.position.seconds


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def observed(tokens, tmp_path_factory):
    """A run with `peak_tflops`, and independent measurements on rank 0."""
    run = tmp_path_factory.mktemp("observed")
    config = make_run(run, tokens, metrics__peak_tflops=0.25, **EVENTS)
    return config, run_ranks(timed, 2, config)[0]


def test_the_phases_add_up_to_the_time_of_the_run(observed):
    config, (at_least_s, at_most_s, rest, steps_s) = observed
    spent = Counter(rest)
    for line in lines_of(config.parent):
        spent.update({name.removeprefix("seconds/"): value for name, value in line.items() if name[:8] == "seconds/"})
    assert at_least_s - ROUNDING_S <= sum(spent.values()) <= at_most_s + ROUNDING_S
    in_steps = sum(spent[phase] for phase in IN_A_STEP)
    assert in_steps - ROUNDING_S <= steps_s <= in_steps + spent["other"] + ROUNDING_S
    assert all(spent[phase] > 0 for phase in (*IN_A_STEP, "validation", "checkpoint"))


def test_speed_and_memory_are_in_their_units(observed):
    config, _ = observed
    run = load_config(config)
    rate = mfu_per_token_rate(run, open_base(run.base).spec, 0.25e12)
    for line in lines_of(config.parent):
        assert 0.05 < line["memory_peak_resident_gib"] < 50
        assert line["restarts"] == 0
        if line["step"] > 0:
            assert line["mfu"] == pytest.approx(line["tokens_per_second_per_gpu"] * rate)


def test_every_figure_is_in_the_table(observed):
    named = re.findall(r"^\| `([^`]+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [re.sub("<[^>]+>", "[^/]+", name) for name in named]
    for name in {name for line in lines_of(observed[0].parent) for name in line}:
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
