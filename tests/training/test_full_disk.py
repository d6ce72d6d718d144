"""A full disk prevents only the checkpoints that do not fit: no step or figure is lost, and the run
continues.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.disks import fill, free
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train

pytestmark = pytest.mark.full

SETTINGS = {"schedule__steps": 5, "validation__max_sequences": 2}
EVERY_STEP = {**SETTINGS, "checkpoints__every_steps": 1, "validation__every_steps": 1}


def test_the_run_continues_and_tries_the_next_save(tokens, tmp_path, small_disk):
    disk = small_disk(mib=24)
    settings = {"zero": 3, "checkpoints__asynchronous": True}
    undisturbed = make_run(tmp_path, tokens, zero=3, **SETTINGS)
    filled = make_run(disk.path, tokens, **settings, **EVERY_STEP)
    jobs = [partial(train, undisturbed), partial(train_with_a_full_disk, filled, (2, 4))]
    assert run_ranks(in_turn, 2, jobs) == [[0, 0]] * 2
    # The saves, validations and faults after every step changed no number.
    assert losses(disk.path) == losses(tmp_path)
    assert ["perplexity/korean" in line for line in metrics(disk.path)] == [True] * 6, (
        "a step's scores are lost"
    )
    assert metrics(disk.path)[-1]["failed_saves"] == 2
    # The first stays as well: a spike could send the run back so far.
    assert names_in(disk.path / "checkpoints") == [
        "latest",
        "step_00000001",
        "step_00000004",
        "step_00000005",
    ]


def test_only_the_last_save_must_succeed(tokens, small_disk):
    disk = small_disk(mib=24)
    config = make_run(disk.path, tokens, zero=1, **{**EVERY_STEP, "schedule__steps": 3})
    checkpoints = disk.path / "checkpoints"
    first, second = run_ranks(in_turn, 2, [partial(train_with_a_full_disk, config, (2, 9))])
    assert first[0].startswith(
        f"CheckpointStorageError: {checkpoints}/step_00000003: the last checkpoint could not"
    )
    assert second == ["exit 74"]
    assert names_in(checkpoints) == ["latest", "step_00000001"]
    disk.free()
    assert run_ranks(train, 2, config) == [0, 0]
    assert len(losses(disk.path)) == 3


def train_with_a_full_disk(config: Path, steps: tuple[int, int]) -> int:
    """Trains; the disk is full from the first of `steps` on, and has room again at the second,
    between two saves.
    """
    from pipeline.training import trainer

    original = trainer.learning_rate

    def at_its_beginning(index: int, *arguments: Any) -> float:
        if os.environ["RANK"] == "0" and index + 1 in steps:
            for writer in (
                thread for thread in threading.enumerate() if thread.name == "checkpoint writer"
            ):
                writer.join()
            (fill if index + 1 == steps[0] else free)(config.parent)
        return original(index, *arguments)

    with patch.object(trainer, "learning_rate", at_its_beginning):
        return train(config)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
