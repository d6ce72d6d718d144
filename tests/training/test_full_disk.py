"""A full disk costs the checkpoints that do not fit, and nothing else: no step, no figure, not the run."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, free
from tests.distributed import RankError, run_ranks
from tests.training.runs import losses, make_run, metrics, train

EVERY_STEP = {"checkpoints__every_steps": 1, "validation__every_steps": 1}
EVENTS = ("failed_saves", "recomputed_steps", "skipped_steps")


@pytest.mark.parametrize(("zero", "asynchronous"), [(1, False), (3, True)])
def test_the_run_goes_on_and_the_next_save_is_tried(tokens, tmp_path, small_disk, zero, asynchronous):
    undisturbed = make_run(tmp_path / "undisturbed", tokens, zero=zero)
    assert run_ranks(train, 2, undisturbed) == [0, 0]

    disk = small_disk(mib=24)
    config = make_run(disk.path, tokens, zero=zero, checkpoints__asynchronous=asynchronous, **EVERY_STEP)
    assert run_ranks(_train_with_a_full_disk, 2, config, (2, 4)) == [0, 0]

    # That it saved, scored and failed after every step changed no number.
    assert losses(disk.path) == losses(tmp_path / "undisturbed")
    assert [len(line) > 10 for line in metrics(disk.path)[1:]] == [True] * 6, "a step's scores are lost"
    assert metrics(disk.path)[-1]["failed_saves"] == 2
    names = sorted(path.name for path in (disk.path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000005", "step_00000006"]


def test_only_the_last_save_must_succeed(tokens, small_disk):
    disk = small_disk(mib=24)
    config = make_run(disk.path, tokens, zero=1, schedule__steps=3, **EVERY_STEP)
    with pytest.raises(RankError, match=r"CheckpointStorageError: .*step_00000003: the last checkpoint could not"):
        run_ranks(_train_with_a_full_disk, 2, config, (2, 9))
    checkpoints = disk.path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000001"]

    disk.free()
    assert run_ranks(train, 2, config) == [0, 0]
    assert len(losses(disk.path)) == 3


def _train_with_a_full_disk(config: Path, steps: tuple[int, int]) -> int:
    """Trains; the disk is full from the first of `steps` on, and has room again at the second, between two saves."""
    from pipeline.training import loop as step

    original = step.learning_rate

    def at_its_beginning(index: int, *arguments: Any) -> float:
        if os.environ["RANK"] == "0" and index + 1 in steps:
            for writer in (one for one in threading.enumerate() if one.name == "checkpoint writer"):
                writer.join()
            (fill if index + 1 == steps[0] else free)(config.parent)
        return original(index, *arguments)

    step.learning_rate = at_its_beginning
    return train(config)
