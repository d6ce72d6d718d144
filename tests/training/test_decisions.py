"""What steers a run is decided once: ranks that measure different numbers do the same, and end together."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import yaml

from tests.distributed import RankError, run_ranks
from tests.training.faults import Planned, train_with
from tests.training.runs import in_turn, make_run, metrics, prepared, start_deepspeed, train, write_config

SPIKE = (Planned("bad batch", 5, times=9), Planned("bad batch", 6, times=9))
ROLLS_BACK: dict[str, Any] = {
    "schedule__steps": 8,
    "checkpoints__every_steps": 2,
    "checkpoints__keep_last": 9,
    "stability": {"window": 2, "spike_steps": 2, "loss_increase": 1.0},
}


def without_replay(folder: Path, tokens: Path, **changes: Any) -> Path:
    """A run without held-out replay: its diagnostics probe training batches, which differ by rank."""
    path = make_run(folder, tokens, zero=1, schedule__learning_rate=2e-2, validation__every_steps=1, **changes)
    values = yaml.safe_load(path.read_text())
    del values["data"]["corpora"]["english"]["heldout_input"]
    path.write_text(yaml.safe_dump(values))
    return path


def steered(config: Path) -> list[tuple[float, float]]:
    """The KL and the learning rate's factor after each validation, and at the end this rank's own KL."""
    start_deepspeed()
    from pipeline.observers import diagnostics
    from pipeline.training.launch import StopSignals
    from pipeline.training.loop import train as train_loop
    from pipeline.training.observer import Observer

    found, own = [], []

    class Recorder(Observer):
        def on_validation(self, event: Any) -> None:
            found.append((event.figures["kl_from_base/training"], event.position.learning_rate_factor))

    original = diagnostics.kl_and_logit_gradient_

    def recorded(*arguments: Any, **columns: Any) -> Any:
        kl, gradient = original(*arguments, **columns)
        own.append(float(kl.sum()))
        return kl, gradient

    trainer, position, _ = prepared(config)
    trainer.observers.members += (Recorder(),)
    with patch.object(diagnostics, "kl_and_logit_gradient_", recorded):
        train_loop(trainer, position, StopSignals())
    trainer.observers.on_end(finished=True)
    return [*found, (own[-1], 0.0)]


def test_ranks_with_different_probes_lower_the_rate_together(tokens, tmp_path):
    budget = {"max_kl_from_base": 1e-3, "action": "lower_learning_rate"}
    config = without_replay(tmp_path, tokens, schedule__steps=3, forgetting=budget)
    first, second = run_ranks(steered, 2, config)
    assert first[:-1] == second[:-1]
    assert first[-2][1] < 1
    assert first[-1] != second[-1]  # otherwise their own numbers would have agreed too


def train_with_a_wrong_norm(config: Path) -> int:
    """Rank 1 reads gradient norms that look like a spike."""
    start_deepspeed()
    from pipeline.training.engine import Engine

    wrong = PropertyMock(side_effect=[1.0, 1.0, 1.0] + [1e9] * 99)
    if os.environ["RANK"] == "0":
        return train(config)
    with patch.object(Engine, "gradient_norm", wrong):
        return train(config)


def test_one_rank_alone_finds_no_spike(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **ROLLS_BACK)
    assert run_ranks(train_with_a_wrong_norm, 2, config) == [0, 0]
    assert not any("rollbacks" in line for line in metrics(tmp_path))


def test_checkpoints_after_a_rollback_never_come_back(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **ROLLS_BACK)
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, config, *SPIKE, Planned("death", 7, times=9))
    checkpoints = tmp_path / "checkpoints"
    # A spike in steps 5 and 6 was found before step 6 was saved. Step 4 began it and is void with its checkpoint.
    position = json.loads((checkpoints / "step_00000002" / "manifest.json").read_text())["position"]
    assert (position["rollbacks"], position["skipped_steps"]) == (1, [4, 5, 6])
    assert not list(checkpoints.glob("*.rolled_back")), "left after a newer one was saved"

    # By hand: what was saved later is void too.
    assert run_ranks(train_with, 1, config, *SPIKE) == [0]
    (checkpoints / "latest").write_text("step_00000006")
    longer = {**ROLLS_BACK, "schedule__steps": 9, "checkpoints__every_steps": 9}
    write_config(tmp_path, tokens, zero=1, **longer)
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, config, Planned("death", 9, times=1))
    assert (checkpoints / "step_00000008.rolled_back").exists(), "removed before there was a newer one"
    assert run_ranks(train, 1, config) == [0]
    assert {path.name[-2:] for path in checkpoints.glob("step_*")} == {"02", "04", "06", "09"}


def test_a_kill_after_a_rollback_does_not_forget_it(tokens, tmp_path):
    """Otherwise the same spike would come again, with a fresh count of rollbacks."""
    settings = {**ROLLS_BACK, "schedule__steps": 9, "checkpoints__every_steps": 4}
    killed, undisturbed = (make_run(tmp_path / name, tokens, zero=1, **settings) for name in ("killed", "not"))
    spike = (Planned("bad batch", 6, times=9), Planned("bad batch", 7, times=9))
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, killed, *spike, Planned("death", 8, times=1))  # the next save is after step 8
    jobs = [partial(train, killed), partial(train_with, undisturbed, *spike)]
    assert run_ranks(in_turn, 1, jobs) == [[0, 0]]
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "not")
