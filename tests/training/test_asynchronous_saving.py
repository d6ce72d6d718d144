"""Asynchronous saves: as complete as synchronous ones, and training does not wait for the disk."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pipeline.checkpoint.torch_files import open_torch_file
from pipeline.training.checkpointing import Background, StateFiles
from tests.distributed import RankError, run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, prepared, start_deepspeed, train
from tests.waiting import PATIENCE_S

SETTINGS = {"schedule__steps": 3, "schedule__micro_batch_size": 4}
ASYNCHRONOUS = {"checkpoints": {"every_steps": 1, "asynchronous": True}}


def test_copies_are_independent_of_later_changes(tmp_path):
    weights = torch.arange(6.0)
    copies = StateFiles(copied=True)
    copies.add(tmp_path / "file.pt", {"a": weights, "again": weights, "views": [weights[2:4]], "step": 3})
    weights.zero_()
    copies.write()
    value = open_torch_file(tmp_path / "file.pt")
    assert value["a"].tolist() == [0, 1, 2, 3, 4, 5] and value["views"][0].tolist() == [2, 3] and value["step"] == 3
    assert value["a"].data_ptr() == value["again"].data_ptr(), "a tensor under two names is written once"


def test_a_fault_on_the_thread_is_raised_once():
    background = Background()
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.finish()
    background.finish()


def test_it_resumes_to_the_same_figures(tokens, tmp_path):
    waiting = make_run(tmp_path / "waiting", tokens, zero=3, **SETTINGS, checkpoints={"every_steps": 1})
    config = make_run(tmp_path / "run", tokens, zero=3, **SETTINGS, **ASYNCHRONOUS)
    slow = make_run(tmp_path / "slow", tokens, zero=1, **SETTINGS, **ASYNCHRONOUS)
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(partial(train, kill_at="before the folder is renamed"), 2, config)
    assert len(losses(tmp_path / "run")) < 3
    jobs = [partial(train, waiting), partial(train, config), partial(_step_waits_for_no_disk, slow)]
    assert run_ranks(in_turn, 2, jobs) == [[0, 0, True]] * 2
    assert metrics(tmp_path / "run") == metrics(tmp_path / "waiting")
    for file in (tmp_path / "waiting" / "checkpoints" / "step_00000003").glob("*optim_states.pt"):
        other = tmp_path / "run" / "checkpoints" / "step_00000003" / file.name
        groups = (open_torch_file(path)["optimizer_state_dict"]["fp32_flat_groups"] for path in (file, other))
        assert all(torch.equal(left, right) for left, right in zip(*groups, strict=True))


def _step_waits_for_no_disk(config: Path) -> bool:
    """Whether a save returns before its files are written, and `finish` after the checkpoint is complete."""
    start_deepspeed()
    from pipeline.checkpoint.folder import latest_checkpoint
    from pipeline.checkpoint.manifest import Position
    from pipeline.training import checkpointing

    trainer, _, _ = prepared(config)
    trainer.observers.on_end(finished=True)
    batch = next(trainer.batches.of_step(0))
    for _ in range(2):
        trainer.engine.backward(trainer.engine.loss(batch)[0])
        trainer.engine.step(1e-3)
    write, returned = checkpointing.write_torch_file, threading.Event()

    def slowly(path, value):
        returned.wait(PATIENCE_S)  # a save that waits for the disk takes this long
        write(path, value)

    with patch.object(checkpointing, "write_torch_file", slowly):
        final = trainer.checkpoints.save(trainer.engine, Position(step=1, tokens_seen=1, seconds=1.0))
        before = latest_checkpoint(trainer.checkpoints.folder)
        returned.set()
        trainer.checkpoints.finish()
    return before is None and latest_checkpoint(trainer.checkpoints.folder) == final
