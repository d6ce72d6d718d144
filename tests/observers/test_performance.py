"""The performance figures of a run: sums, units and documentation; traces change no number."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.model.from_hf import open_base
from pipeline.observers.performance import PROFILE
from pipeline.sizing.mfu import mfu_per_token_rate
from tests.distributed import run_ranks
from tests.files import read_jsonl
from tests.training.runs import in_turn, make_run, metrics, train

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
IN_A_STEP = ("data", "forward", "backward", "step", "communication")
EVENTS = {
    "zero": 1,
    "schedule__steps": 4,
    "validation__every_steps": 2,
    "checkpoints__every_steps": 3,
}


@pytest.fixture(scope="module")
def observed(tokens, tmp_path_factory):
    """A run with `peak_tflops`: its configuration and its figures."""
    run = tmp_path_factory.mktemp("observed")
    config = make_run(run, tokens, metrics__peak_tflops=0.25, **EVENTS)
    assert run_ranks(train, 2, config) == [0, 0]
    return config, read_jsonl(run / "metrics.jsonl")


def test_speed_time_and_memory_are_in_their_units(observed):
    config, lines = observed
    run = load_config(config)
    rate = mfu_per_token_rate(run, open_base(run.base).spec, 0.25e12)
    for line in lines:
        assert 0.05 < line["memory_peak_resident_gib"] < 50
        if line["step"] > 0:
            assert line["mfu"] == pytest.approx(line["tokens_per_second_per_gpu"] * rate)
            for phase in IN_A_STEP:
                assert line[f"seconds/{phase}"] > 0

    # The steps' time lies between that of their phases and that with all else.
    phases_s = 0.0
    for line in lines[1:]:
        for phase in IN_A_STEP:
            phases_s += line[f"seconds/{phase}"]
    other_s = sum(line["seconds/other"] for line in lines)
    steps_s = json.loads((config.parent / "training.json").read_text())["seconds"]
    rounding_s = 1e-3
    assert phases_s <= steps_s + rounding_s <= phases_s + other_s + 2 * rounding_s


def test_every_figure_is_in_the_table(observed):
    firsts = re.findall(r"^\| (`[^|]+`) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = []
    for first in firsts:
        for name in re.findall("`([^`]+)`", first):
            patterns.append(re.sub("<[^>]+>", "[^/]+", name))  # <corpus> is any corpus
    _, lines = observed
    for name in set().union(*lines):
        assert any(re.fullmatch(pattern, name) for pattern in patterns), (
            f"{name} is not in {TABLE.name}"
        )


@pytest.mark.full
def test_a_trace_has_the_configured_steps_and_changes_no_figure(tokens, tmp_path):
    plain = make_run(tmp_path / "plain", tokens, **EVENTS)
    config = make_run(
        tmp_path / "traced", tokens, profile={"steps": [2, 3], "ranks": [1]}, **EVENTS
    )
    stopped = make_run(tmp_path / "stopped", tokens, profile={"steps": [1, 100]}, **EVENTS)
    alone = make_run(tmp_path / "alone", tokens, profile={"steps": [1, 1], "ranks": [0, 2]})
    jobs = [
        partial(train, stopped, stop=True),
        partial(train, plain),
        partial(train, config),
        partial(train, alone),
    ]
    first, second = run_ranks(in_turn, 2, jobs)
    assert (first[:3], second) == ([75, 0, 0], [75, 0, 0, "exit 2"])
    assert first[3].startswith(
        "ConfigError: profile.ranks: found rank 2, expected ranks from 0 to 1"
    )
    assert len(list((stopped.parent / PROFILE).iterdir())) == 1, "a stopped run writes its trace"
    assert metrics(config.parent) == metrics(plain.parent)
    assert not (plain.parent / PROFILE).exists()

    (trace,) = (config.parent / PROFILE).iterdir()
    assert re.fullmatch(r"rank_00001\.\d+\.pt\.trace\.json\.gz", trace.name)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in spans)
    names = Counter(event["name"] for event in spans)
    assert [names[f"ProfilerStep#{step}"] for step in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert names["forward"] == names["backward"] == 2 * 2  # steps and micro-batches
    assert any("gloo" in name for name in names)
