"""What counts as a spike; and a run that meets one goes on as if the samples that led to it were not there."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pipeline.checkpoint.manifest import StepRecord
from pipeline.config.run import Stability
from pipeline.training.divergence import REPORT, find_spike, remembered, set_aside
from tests.distributed import RankError, run_ranks
from tests.training.faults import Planned, train_with, train_without
from tests.training.runs import make_run, metrics

CLIPPING = 1.0


def recent(steps: list[tuple[float, float]], stability: Stability) -> tuple[StepRecord, ...]:
    records: tuple[StepRecord, ...] = ()
    for step, (loss, norm) in enumerate(steps, start=1):
        records = remembered(records, StepRecord(step, loss, norm), stability)
    return records


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ([(2.0, 0.5)] * 3, False),
        ([(9.0, 90.0), (2.0, 0.5), (9.0, 90.0)], False),  # single bad batches
        ([(3.1, 0.5)] * 3, True),
        ([(2.9, 0.5)] * 3, False),
        ([(2.0, 5.1)] * 3, True),
        ([(2.0, 4.9)] * 3, False),
        ([(3.1, 0.5), (2.0, 5.1), (3.1, 5.1)], True),
    ],
)
def test_a_spike_is_some_steps_in_a_row_beyond_the_median(last, found):
    stability = Stability(window=20)
    assert bool(find_spike(recent([(2.0, 0.5)] * 20 + last, stability), stability, CLIPPING)) == found
    assert not find_spike(recent([(2.0, 0.5)] * 19 + last, stability), stability, CLIPPING), "the window is not full"
    off = Stability(window=20, loss_increase=None, gradient_norm_factor=None)
    assert not find_spike(recent([(2.0, 0.5)] * 20 + last, off), off, CLIPPING)


def test_what_clipping_lets_through_is_no_spike():
    stability = Stability(window=20)
    assert not find_spike(recent([(2.0, 0.01)] * 20 + [(2.0, 0.9)] * 3, stability), stability, CLIPPING)


def test_an_ordinary_run_has_none():
    draw = random.Random(0)
    stability, records = Stability(), ()
    for step in range(1, 5000):
        loss = 2 + 8 * 0.995**step + draw.gauss(0, 0.3)  # of a batch far smaller than any in use
        records = remembered(records, StepRecord(step, loss, draw.lognormvariate(0, 1)), stability)
        assert not find_spike(records, stability, CLIPPING)
    assert len(records) == stability.window + stability.spike_steps


def test_the_step_whose_update_began_it_is_set_aside_too():
    assert list(set_aside([StepRecord(step, 9.0, 1.0) for step in (7, 8, 9)])) == [6, 7, 8, 9]


SETTINGS: dict[str, Any] = {
    "schedule__steps": 8,
    "checkpoints__every_steps": 2,
    "stability": {"window": 2, "spike_steps": 2, "loss_increase": 1.0},
}
SPIKE = (Planned("bad batch", 5, times=9), Planned("bad batch", 6, times=9))


@pytest.mark.parametrize(("zero", "asynchronous"), [(1, True), (3, False)])
def test_it_goes_back_and_leaves_the_samples_out(tokens, tmp_path, zero, asynchronous):
    settings = {**SETTINGS, "checkpoints__asynchronous": asynchronous}
    config = make_run(tmp_path / "run", tokens, zero=zero, **settings)
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(train_with, 2, config, *SPIKE, Planned("death", 7, times=9))
    # After the rollback; an asynchronous save may not have come to its end.
    saved = ("step_00000004", "step_00000006") if asynchronous else ("step_00000006",)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() in saved
    assert run_ranks(train_with, 2, config, *SPIKE) == [0, 0]
    found = metrics(tmp_path / "run")
    assert [line.pop("rollbacks", 0) for line in found] == [0, 0, 0, 0, 1, 1, 1, 0, 0]

    config = make_run(tmp_path / "without", tokens, zero=zero, **settings)
    run_ranks(train_without, 2, config, 4, 5, 6)
    assert found == metrics(tmp_path / "without")
    assert [line["step"] for line in found if "loss" not in line] == [0, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stability__max_rollbacks": 0}, "after 0 rollbacks, as many as stability.max_rollbacks"),
        ({"stability__max_skipped_steps": 2}, "3 steps were skipped, more than stability.max_skipped_steps 2"),
        ({"checkpoints__keep_last": 1}, "no checkpoint lies before it"),
    ],
)
def test_what_cannot_be_mended_ends_in_one_line_and_a_report(tokens, tmp_path, changes, message):
    config = make_run(tmp_path, tokens, zero=1, **{**SETTINGS, "stability": dict(SETTINGS["stability"]), **changes})
    with pytest.raises(RankError, match=f"DivergenceError: .*{message}"):
        run_ranks(train_with, 1, config, *SPIKE)
    report = json.loads((tmp_path / REPORT).read_text())
    assert message in report["reason"]
    assert report["recent"]
