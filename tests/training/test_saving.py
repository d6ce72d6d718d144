"""Saves that are killed or asynchronous lose nothing; a finished run stays as it is, and may train
longer.
"""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from pipeline.checkpoint.folder import latest_checkpoint
from pipeline.checkpoint.position import Position
from pipeline.checkpoint.rank_files import RankState
from pipeline.config.checkpoints import CheckpointSettings as Settings
from pipeline.run_folder import attempts
from pipeline.run_folder.attempts import read_attempts
from tests.checkpoint.test_manifest import LAYOUT, record
from tests.distributed import RankError, run_ranks
from tests.training.runs import KILL_POINTS, in_turn, losses, make_run, metrics, train
from tests.waiting import PATIENCE_S

STEPS = 3


def test_a_kill_during_a_save_loses_nothing_that_was_saved(tokens, tmp_path):
    """At every instant of the changes to the folder: `tests/checkpoint/test_folder.py`."""
    undisturbed = make_run(tmp_path / "undisturbed", tokens, zero=1, schedule__steps=STEPS)
    for point in KILL_POINTS:
        asynchronous = point == "before the folder is renamed"
        settings = {
            "checkpoints": {"every_steps": 1, "keep_last": 1, "asynchronous": asynchronous},
            "stability": {"max_rollbacks": 0},  # else earlier ones would be kept for them
            "zero": 1,
        }
        config = make_run(
            tmp_path / point, tokens, name="given.yaml", schedule__steps=STEPS + 1, **settings
        )
        with pytest.raises(RankError, match="died without a result"):
            run_ranks(partial(train, kill_at=point, changes=[f"schedule.steps={STEPS}"]), 2, config)
        saved = (tmp_path / point / "checkpoints" / "latest").read_text().strip()
        assert saved == (
            "step_00000002" if point == "before the old one is removed" else "step_00000001"
        ), point
    jobs = [
        partial(train, undisturbed),
        *(partial(train, tmp_path / point / "run.yaml") for point in KILL_POINTS),
    ]
    assert run_ranks(in_turn, 2, jobs) == [[0] * len(jobs)] * 2
    for point in KILL_POINTS:
        assert metrics(tmp_path / point) == metrics(tmp_path / "undisturbed"), point
        names = sorted(path.name for path in (tmp_path / point / "checkpoints").iterdir())
        assert names == ["latest", f"step_{STEPS:08d}"], f"{point}: stale folders are left"


def test_a_finished_run_is_unchanged_and_may_train_longer(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, schedule__steps=1)
    longer = make_run(
        tmp_path,
        tokens,
        zero=1,
        name="longer.yaml",
        schedule__steps=3,
        init_expansion=f"{tmp_path}/initial_expansion",
    )
    state, attempt = partial(_written, tmp_path), partial(partial, _attempt)
    jobs = [attempt("1", config), state, attempt("2", config), state, attempt("3", longer)]
    [(first, before, again, after, at_last)] = run_ranks(in_turn, 1, jobs)
    assert (first, again, at_last) == (0, 0, 0)
    assert before == after
    assert json.loads(before[tmp_path / "training.json"][1])["steps"] == 1
    ends = [attempt.end for attempt in read_attempts(tmp_path)]
    assert [end.exit_code for end in ends if end] == [0, 0, 0], (
        "the attempt that found nothing to do is on record"
    )
    assert len(losses(tmp_path)) == 3
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 3


def _attempt(name: str, config: Path) -> int:
    with patch.dict(os.environ, ATTEMPT=f"{name}.0"):
        return train(config)


def _written(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """When each file of a run was last written, except for the record of the attempts, and the
    summary's content.
    """
    written = {}
    for path in folder.rglob("*"):
        if not path.is_file() or path.name == attempts.NAME:
            continue
        content = b""
        if path.name == "training.json":
            content = path.read_bytes()
        written[path] = (path.stat().st_mtime_ns, content)
    return written


def test_a_step_waits_for_no_disk_and_a_fault_of_the_writer_is_raised(tmp_path):
    assert run_ranks(_save_twice, 1, tmp_path) == [(None, "step_00000001", "step_00000001")]
    with safe_open(tmp_path / "step_00000001" / "rank_00000.safetensors", "pt") as file:
        assert file.get_tensor("w/fp32").tolist() == [0, 1, 2], (
            "the step after the save changed what it writes"
        )


def _save_twice(folder: Path) -> tuple[object, ...]:
    """What `latest` names when a save has returned, when it is complete, and after one that failed
    unforeseen.
    """
    from pipeline.training import checkpointing

    weights = torch.arange(3.0)
    engine: Any = SimpleNamespace(
        state=lambda: RankState(0, 1, {"w": 0}, {"w/fp32": weights}, torch.tensor(1.0), {})
    )
    checkpoints = checkpointing.CheckpointManager(
        folder, record(), LAYOUT, Settings(asynchronous=True)
    )
    write, returned = checkpointing.write_rank_file, threading.Event()

    def slowly(path, value):
        returned.wait(PATIENCE_S)  # a save that waits for the disk takes this long
        write(path, value)

    def named():
        latest = latest_checkpoint(folder)
        return latest and latest.name

    with patch.object(checkpointing, "write_rank_file", slowly):
        checkpoints.save(engine, Position(step=1))
        weights.zero_()
        found = [named()]
        returned.set()
        checkpoints.finish()
    found.append(named())
    with patch.object(checkpointing, "write_rank_file", side_effect=ZeroDivisionError):
        checkpoints.save(engine, Position(step=2))
        with pytest.raises(ZeroDivisionError):
            checkpoints.finish()
    return (*found, named())


def test_a_save_succeeds_where_an_older_checkpoint_cannot_be_removed(tmp_path):
    assert run_ranks(_save_beside_one_that_stays, 1, tmp_path) == [(0, "step_00000002")]
    assert (tmp_path / "step_00000001").exists(), "nothing was superseded"


def _save_beside_one_that_stays(folder: Path) -> tuple[int, str]:
    """How many saves failed, and what `latest` names."""
    from pipeline.training import checkpointing

    values = {"w/fp32": torch.arange(3.0)}
    engine: Any = SimpleNamespace(
        state=lambda: RankState(0, 1, {"w": 0}, values, torch.tensor(1.0), {})
    )
    checkpoints = checkpointing.CheckpointManager(folder, record(), LAYOUT, Settings(keep_last=1))
    checkpoints.save(engine, Position(step=1))
    checkpoints.finish()
    with patch.object(checkpointing.folders, "discard", side_effect=OSError(116, "Stale handle")):
        checkpoints.save(engine, Position(step=2), required=True)
    latest = latest_checkpoint(folder)
    assert latest is not None
    return checkpoints.failed_saves, latest.name
