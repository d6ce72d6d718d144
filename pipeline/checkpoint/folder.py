"""The checkpoints of one run: choosing the one to resume from, publishing one, removing old ones.

A checkpoint is a folder `step_00000500`. It is written under a hidden name and renamed when it is
complete; only then does the file `latest` name it. To go back further, a user writes an older one's
name into `latest`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint.manifest import CHECKPOINT, MANIFEST_FILE
from pipeline.config.run import RunConfig
from pipeline.errors import CheckpointError, OutputError
from pipeline.files.folders import check_replaceable, holds, rename_aside, replace_directory
from pipeline.files.publishing import sync, write_text
from pipeline.files.threads import in_threads
from pipeline.run_folder.checkpoint_names import LATEST, all_checkpoints, named_checkpoint, step_in

DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was found damaged."""
ROLLED_BACK = ".rolled_back"
"""Ends the name of a checkpoint that is later than the one to which the run went back.

It is removed when the next checkpoint is complete.
"""


def step_of(checkpoint: Path) -> int:
    """The step at which a checkpoint was saved."""
    step = step_in(checkpoint.name)
    assert step is not None, checkpoint
    return step


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or where it names none the newest; None if nothing was
    saved yet.

    Raises:
        CheckpointError: the named one is missing or not complete.
    """
    named = named_checkpoint(folder)
    if named is None:
        # A run that resumes takes the newest too (`candidates`).
        complete = [path for path in all_checkpoints(folder) if (path / MANIFEST_FILE).exists()]
        return complete[-1] if complete else None
    if (named / MANIFEST_FILE).exists():
        return named
    others = [path.name for path in all_checkpoints(folder) if path != named]
    raise CheckpointError(
        f"{folder / LATEST}: names {named.name}, which is missing or not complete; write another "
        f"name: {', '.join(others) or 'none'}"
    )


def newest_checkpoint(config: RunConfig) -> Path:
    """The newest checkpoint of a run: see `latest_checkpoint`.

    Raises:
        CheckpointError: the run has saved none, or `latest` names one that is missing.
    """
    return newest_in(config.checkpoint_folder)


def newest_in(folder: Path) -> Path:
    """The newest checkpoint in the folder of a run's checkpoints; raises as `newest_checkpoint`."""
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: holds no checkpoint yet: train the run first")
    return checkpoint


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to resume from, best first: the one that `latest` names, then older ones."""
    found = all_checkpoints(folder)
    found.reverse()
    named = named_checkpoint(folder)
    if named is None:
        return found
    # Checkpoints after the one that `latest` names belong to steps that the run went back from.
    return [path for path in found if step_of(path) <= step_of(named)]


def quarantine(checkpoint: Path, suffix: str = DAMAGED) -> Path:
    """Renames a checkpoint, so that no run resumes from it and nothing of it is lost.

    Returns its new path.
    """
    aside = checkpoint.with_name(checkpoint.name + suffix)
    for number in itertools.count(2):
        if not aside.exists():
            break
        aside = checkpoint.with_name(f"{checkpoint.name}{suffix}.{number}")
    # `aside` is beside it, in the same file system: elsewhere a rename would be a copy.
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f".{final.name}.partial")


def publish(partial: Path, final: Path) -> None:
    """Renames a complete checkpoint from `partial` to `final` and makes `latest` name it.

    What is at `final` and is no checkpoint, or a damaged one, is renamed: nothing of it is lost.
    """
    try:
        check_replaceable(final, CHECKPOINT)
    except OutputError:
        quarantine(final)
    # An attempt that was killed, or rolled back, may have saved the same step. Its checkpoint is
    # removed only when the new one is in place.
    # `latest` changes only after the rename is on the disk: a reader that follows it finds a whole
    # checkpoint.
    replaced = replace_directory(partial, final)
    set_latest(final)
    shutil.rmtree(replaced, ignore_errors=True)


def set_latest(checkpoint: Path) -> None:
    """Makes `latest` name `checkpoint`."""
    write_text(checkpoint.parent / LATEST, checkpoint.name + "\n")


def rollback_to(checkpoint: Path) -> None:
    """Makes `latest` name `checkpoint` and renames the later checkpoints, which are void.

    A checkpoint whose save was killed before `latest` named it is renamed too: the files alone
    cannot tell it from a void one.
    """
    set_latest(checkpoint)
    # `latest` first: a kill in between leaves later checkpoints that `candidates` passes over.
    for path in all_checkpoints(checkpoint.parent):
        if step_of(path) > step_of(checkpoint):
            quarantine(path, ROLLED_BACK)


def superseded(
    steps: Sequence[int], keep_last: int, keep_every_steps: int | None, rollback_steps: int = 0
) -> list[int]:
    """Which of the checkpoints at these `steps` (ascending) are to be removed.

    Kept are the last `keep_last`, every one at a multiple of `keep_every_steps`, and the newest one
    that lies `rollback_steps` or more behind the last, with all after it: training may have to go
    back so far. All are kept if none lies so far behind.
    """
    if not steps:
        return []
    oldest_kept = steps[-keep_last:][0]
    rollback_step = steps[0]
    for step in steps:
        if step <= steps[-1] - rollback_steps:
            rollback_step = step
    oldest_kept = min(oldest_kept, rollback_step)

    removed = []
    for step in steps:
        is_milestone = keep_every_steps is not None and step % keep_every_steps == 0
        if step < oldest_kept and not is_milestone:
            removed.append(step)
    return removed


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint, and no other kind of folder.

    It is renamed first, so that a kill cannot leave half of it under its own name.
    """
    if not holds(CHECKPOINT, checkpoint):
        return
    aside = rename_aside(checkpoint)
    # There is a file for each rank, perhaps on a slow file system: several are removed at a time.
    with contextlib.suppress(OSError):
        for _ in in_threads(os.unlink, aside.iterdir()):
            pass
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes left half-written or half-deleted."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)
