"""What counts as a spike; a run with a spike continues as if its samples did not exist."""

from __future__ import annotations

import json
import os
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from pipeline.checkpoint.position import Position, StepRecord
from pipeline.config.stability import Stability
from pipeline.training.divergence import REPORT, find_spike
from tests.distributed import RankError, run_ranks
from tests.training.faults import Planned, train_with, train_without
from tests.training.runs import in_turn, make_run, metrics, start_deepspeed, train, write_config

pytestmark = pytest.mark.full

CLIPPING = 1.0


def recent(steps: list[tuple[float, float]], stability: Stability) -> tuple[StepRecord, ...]:
    position = Position()
    for step, (loss, norm) in enumerate(steps, start=1):
        position = position.recording(StepRecord(step, loss, norm), stability)
    return position.recent


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
def test_a_spike_is_several_consecutive_steps_above_the_median(last, found):
    stability = Stability(window=20)
    assert (
        bool(find_spike(recent([(2.0, 0.5)] * 20 + last, stability), stability, CLIPPING)) == found
    )
    assert not find_spike(recent([(2.0, 0.5)] * 19 + last, stability), stability, CLIPPING), (
        "the window is not full"
    )
    unclipped = [(2.0, 0.01)] * 20 + [(2.0, 0.9)] * 3
    assert not find_spike(recent(unclipped, stability), stability, CLIPPING)
    off = Stability(window=20, loss_increase=None, gradient_norm_factor=None)
    assert not find_spike(recent([(2.0, 0.5)] * 20 + last, off), off, CLIPPING)


def test_an_ordinary_run_has_no_spike():
    draw = random.Random(0)
    stability, position = Stability(), Position()
    for step in range(1, 5000):
        loss = 2 + 8 * 0.995**step + draw.gauss(0, 0.3)  # of a batch far smaller than any in use
        record = StepRecord(step, loss, draw.lognormvariate(0, 1))
        position = position.recording(record, stability)
        assert not find_spike(position.recent, stability, CLIPPING)
    assert len(position.recent) == stability.window + stability.spike_steps


SETTINGS: dict[str, Any] = {
    "schedule__steps": 8,
    "checkpoints__every_steps": 2,
    "stability": {"window": 2, "spike_steps": 2, "loss_increase": 1.0},
}
SPIKE = (Planned("bad batch", 5, times=9), Planned("bad batch", 6, times=9))


@pytest.mark.parametrize(
    ("changes", "spike", "killed_at", "skipped"),
    [
        (
            {"zero": 3, "checkpoints__asynchronous": True, "schedule__micro_batch_size": 4},
            (5, 6),
            7,
            (4, 5, 6),
        ),
        # Before the next save.
        ({"zero": 1, "checkpoints__every_steps": 4, "schedule__steps": 9}, (6, 7), 8, (5, 6, 7)),
        # The last checkpoint before the spike is the newest but one.
        ({"zero": 1, "checkpoints__keep_last": 1}, (5, 6), 7, (4, 5, 6)),
    ],
)
def test_it_rolls_back_and_skips_the_samples_and_a_kill_does_not_forget_it(
    tokens, tmp_path, changes, spike, killed_at, skipped
):
    killed, without = (
        make_run(tmp_path / name, tokens, **SETTINGS | changes) for name in ("killed", "without")
    )
    planned = [Planned("bad batch", step, times=9) for step in spike]
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 2, killed, *planned, Planned("death", killed_at, times=9))
    jobs = [partial(train, killed), partial(train_without, without, *skipped)]
    assert run_ranks(in_turn, 2, jobs) == [[0, None]] * 2
    found = metrics(tmp_path / "killed")
    assert {line.pop("rollbacks", 0) for line in found} == {0, 1}
    assert found == metrics(tmp_path / "without")
    assert [line["step"] for line in found if "loss" not in line] == [0, *skipped]


def test_checkpoints_after_a_rollback_never_come_back(tokens, tmp_path):
    settings = SETTINGS | {"zero": 1, "checkpoints__keep_last": 9}
    config = make_run(tmp_path, tokens, **settings)
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, config, *SPIKE, Planned("death", 7, times=9))
    checkpoints = tmp_path / "checkpoints"
    # A spike in steps 5 and 6 was found before step 6 was saved. Step 4 began it and is void with
    # its checkpoint.
    position = json.loads((checkpoints / "step_00000002" / "manifest.json").read_text())["position"]
    assert (position["rollbacks"], position["skipped_steps"]) == (1, [4, 5, 6])
    assert not list(checkpoints.glob("*.rolled_back")), "left after a newer one was saved"

    # By hand: what was saved later is void too.
    assert run_ranks(train_with, 1, config, *SPIKE) == [0]
    (checkpoints / "latest").write_text("step_00000006")
    write_config(
        tmp_path, tokens, **settings | {"schedule__steps": 9, "checkpoints__every_steps": 9}
    )
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, config, Planned("death", 9, times=1))
    assert (checkpoints / "step_00000008.rolled_back").exists(), (
        "removed before there was a newer one"
    )
    assert run_ranks(train, 1, config) == [0]
    assert {path.name[-2:] for path in checkpoints.glob("step_*")} == {"02", "04", "06", "09"}


def test_a_run_that_cannot_recover_ends_in_one_line_and_a_report(tokens, tmp_path):
    cases = [
        ({"stability__max_rollbacks": 0}, "after 0 rollbacks, as many as stability.max_rollbacks"),
        (
            {"stability__max_skipped_steps": 2},
            "3 steps were skipped, more than stability.max_skipped_steps 2",
        ),
        ({"checkpoints__every_steps": 4}, "no checkpoint lies before it"),
    ]
    configs = [
        make_run(tmp_path / str(number), tokens, zero=1, **(deepcopy(SETTINGS) | changes))
        for number, (changes, _) in enumerate(cases)
    ]
    [errors] = run_ranks(in_turn, 1, [partial(train_with, config, *SPIKE) for config in configs])
    for (_, message), config, error in zip(cases, configs, errors, strict=True):
        assert error.startswith("DivergenceError: ") and message in error
        report = json.loads((config.parent / REPORT).read_text())
        assert message in report["reason"]
        assert report["recent"]


def train_with_a_wrong_norm(config: Path) -> int:
    """Rank 1 reads gradient norms that look like a spike."""
    start_deepspeed()
    from pipeline.training.engine import Engine

    if os.environ["RANK"] == "0":
        return train(config)
    with patch.object(Engine, "gradient_norm", PropertyMock(side_effect=[1.0] * 3 + [1e9] * 99)):
        return train(config)


def test_one_rank_alone_finds_no_spike(tokens, tmp_path):
    config = make_run(
        tmp_path, tokens, zero=1, checkpoints__every_steps=2, stability=SETTINGS["stability"]
    )
    assert run_ranks(train_with_a_wrong_norm, 2, config) == [0, 0]
    assert not any("rollbacks" in line for line in metrics(tmp_path))
