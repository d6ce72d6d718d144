"""The checkpoints of one run: choosing the one to resume from, publishing one, and removing old ones.

A checkpoint is a folder `step_00000500`. It is written under a hidden name and renamed when it is complete; only then
does the file `latest` name it. To go back further, a user writes an older one's name into `latest`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint.manifest import CHECKPOINT, MANIFEST_FILE
from pipeline.config.run import RunConfig
from pipeline.errors import CheckpointError, OutputError
from pipeline.files import (
    check_replaceable,
    holds,
    in_threads,
    rename_aside,
    replace_directory,
    sync,
    write_text,
)
from pipeline.run_folder.checkpoint_names import LATEST, all_checkpoints, named_checkpoint, step_in

DAMAGED = ".damaged"
ROLLED_BACK = ".rolled_back"
"""What a run saved after the checkpoint to which it then went back; removed when the next one is complete."""


def step_of(checkpoint: Path) -> int:
    step = step_in(checkpoint.name)
    assert step is not None, checkpoint
    return step


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; None if nothing was saved yet. Raises CheckpointError if it is incomplete."""
    named = named_checkpoint(folder)
    if named is not None and not (named / MANIFEST_FILE).exists():
        others = ", ".join(path.name for path in all_checkpoints(folder) if path != named) or "none"
        raise CheckpointError(
            f"{folder / LATEST}: names {named.name}, which is missing or not complete; write another name: {others}"
        )
    return named


def newest_checkpoint(config: RunConfig) -> Path:
    """The checkpoint that a run's `checkpoints/latest` names.

    Raises:
        CheckpointError: the run has saved none, or `latest` names none.
    """
    checkpoint = latest_checkpoint(config.checkpoint_folder)
    if checkpoint is None:
        latest = config.checkpoint_folder / LATEST
        raise CheckpointError(
            f"{latest}: no such file; the run has no checkpoint yet: train it first"
        )
    return checkpoint


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to resume from, best first: the one that `latest` names, then older ones."""
    named, found = named_checkpoint(folder), all_checkpoints(folder)[::-1]
    return found if named is None else [path for path in found if step_of(path) <= step_of(named)]


def set_aside(checkpoint: Path, suffix: str = DAMAGED) -> Path:
    """Renames a checkpoint, so that it is no candidate and nothing of it is lost; returns its new path."""
    aside = checkpoint.with_name(checkpoint.name + suffix)
    for number in itertools.count(2):
        if not aside.exists():
            break
        aside = checkpoint.with_name(f"{checkpoint.name}{suffix}.{number}")
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f".{final.name}.partial")


def publish(partial: Path, final: Path) -> None:
    """Renames a complete checkpoint from `partial` to `final` and makes `latest` name it.

    What is there and is no checkpoint, or a damaged one, is renamed: nothing of it is lost.
    """
    try:
        check_replaceable(final, CHECKPOINT)
    except OutputError:
        set_aside(final)
    # An attempt that was killed, or rolled back, may have saved the same step. Its checkpoint is removed last.
    replaced = replace_directory(partial, final)
    point_to(final)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(checkpoint: Path) -> None:
    """Makes `latest` name `checkpoint`."""
    write_text(checkpoint.parent / LATEST, checkpoint.name + "\n")


def go_back_to(checkpoint: Path) -> None:
    """Makes `latest` name `checkpoint`, and renames the later ones: the run's steps after it are void.

    So is one whose save was killed before `latest` named it: from the files alone it might be one of those.
    """
    point_to(checkpoint)
    for path in all_checkpoints(checkpoint.parent):
        if step_of(path) > step_of(checkpoint):
            set_aside(path, ROLLED_BACK)


def superseded(
    steps: Sequence[int], keep_last: int, keep_every_steps: int | None, rollback_steps: int = 0
) -> list[int]:
    """Which of the checkpoints after these `steps` (ascending) are to be removed.

    One that lies `rollback_steps` behind the newest stays, with those after it: training may have to go back so far.
    """
    if not steps:
        return []
    far_enough = [step for step in steps if step <= steps[-1] - rollback_steps]
    oldest = min(steps[-keep_last:][0], far_enough[-1] if far_enough else steps[0])
    return [
        step
        for step in steps
        if step < oldest and (keep_every_steps is None or step % keep_every_steps != 0)
    ]


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint, and nothing else. It is renamed first: a kill cannot leave half of it under its name."""
    if holds(CHECKPOINT, checkpoint):
        aside = rename_aside(checkpoint)
        with contextlib.suppress(
            OSError
        ):  # a file for each rank, on a file system that may be slow
            deque(in_threads(os.unlink, aside.iterdir()), maxlen=0)
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes left half-written or half-deleted."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)
