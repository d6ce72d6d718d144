"""A save that training does not wait for is as whole as any other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.torch_files import open_torch_file
from pipeline.training.checkpointing import Background, HostCopies
from tests.distributed import RankError, run_ranks
from tests.training.runs import losses, make_run, metrics, prepared, start_deepspeed, train
from tests.waiting import PATIENCE_S

SETTINGS = {"schedule__steps": 4, "checkpoints": {"every_steps": 1, "asynchronous": True}}


def test_copies_do_not_follow_what_training_changes(tmp_path):
    weights = torch.arange(6.0)
    copies = HostCopies()
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


def test_it_goes_on_to_the_same_figures(tokens, tmp_path):
    waiting = make_run(tmp_path / "waiting", tokens, zero=3, **{**SETTINGS, "checkpoints": {"every_steps": 1}})
    assert run_ranks(train, 2, waiting) == [0, 0]
    config = make_run(tmp_path / "run", tokens, zero=3, **SETTINGS)
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(_killed, 2, config)
    assert len(losses(tmp_path / "run")) < 4
    assert run_ranks(train, 2, config) == [0, 0]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "waiting")
    for file in (tmp_path / "waiting" / "checkpoints" / "step_00000004").glob("*optim_states.pt"):
        other = tmp_path / "run" / "checkpoints" / "step_00000004" / file.name
        one, two = (open_torch_file(path)["optimizer_state_dict"]["fp32_flat_groups"] for path in (file, other))
        assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def _killed(config):
    return train(config, kill_at="before the folder is renamed")


def test_the_step_does_not_wait_for_the_disk(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **SETTINGS)
    assert run_ranks(_slow_disk, 2, config) == [True, True]


def _slow_disk(config: Path) -> bool:
    """Whether a save returns while the disk is at work, and `finish` when the checkpoint is whole."""
    start_deepspeed()
    from pipeline.checkpoint.folder import latest_checkpoint
    from pipeline.checkpoint.manifest import Position
    from pipeline.training import checkpointing as saved_files

    trainer, _, _ = prepared(config)
    trainer.observers.on_end(finished=True)
    batch = next(trainer.batches.of_step(0))
    for _ in range(2):
        trainer.engine.backward(trainer.engine.loss(batch)[0])
        trainer.engine.step(1e-3)
    write, returned = saved_files.write_torch_file, threading.Event()

    def slowly(path, value):
        returned.wait(PATIENCE_S)  # a save that waits for the disk is held up so long
        write(path, value)

    saved_files.write_torch_file = slowly
    final = trainer.checkpoints.save(trainer.engine, Position(step=1, tokens_seen=1, seconds=1.0))
    before = latest_checkpoint(trainer.checkpoints.folder)
    returned.set()
    trainer.checkpoints.finish()
    return before is None and latest_checkpoint(trainer.checkpoints.folder) == final
