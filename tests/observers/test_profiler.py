"""Traces: they hold the requested steps and ranks, and change no number."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from functools import partial

from pipeline.observers.performance import PROFILE
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, metrics, train

EVENTS = {"schedule__steps": 4, "validation__every_steps": 2, "checkpoints__every_steps": 3, "zero": 1}


def test_a_trace_has_the_configured_steps_and_changes_no_figure(tokens, tmp_path):
    plain = make_run(tmp_path / "plain", tokens, **EVENTS)
    config = make_run(tmp_path / "traced", tokens, profile={"steps": [2, 3], "ranks": [1]}, **EVENTS)
    stopped = make_run(tmp_path / "stopped", tokens, profile={"steps": [1, 100]}, **EVENTS)
    alone = make_run(tmp_path / "alone", tokens, profile={"steps": [1, 1], "ranks": [0, 2]})
    jobs = [partial(train, stopped, stop=True), partial(train, plain), partial(train, config), partial(train, alone)]
    first, second = run_ranks(in_turn, 2, jobs)
    assert (first[:3], second) == ([75, 0, 0], [75, 0, 0, "exit 2"])
    assert first[3].startswith("ConfigError: profile.ranks: rank 2 of 2 ranks")
    assert len(list((stopped.parent / PROFILE).iterdir())) == 1, "a stopped run writes its trace"
    assert metrics(config.parent) == metrics(plain.parent)
    assert not (plain.parent / PROFILE).exists()

    (trace,) = (config.parent / PROFILE).iterdir()
    assert re.fullmatch(r"step_00000002\.rank_00001\.\d+\.pt\.trace\.json\.gz", trace.name)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in spans)
    names = Counter(event["name"] for event in spans)
    assert [names[f"ProfilerStep#{step}"] for step in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert names["forward"] == names["backward"] == 2 * 2  # steps and micro-batches
    assert any("gloo" in name for name in names)
