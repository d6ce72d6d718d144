"""The checkpoints of one run beside each other: which there are, which one is next, which stay and which go.

A checkpoint is a folder `step_00000500`. It is written under a hidden name and renamed when it is whole; only then does
the file `latest` name it. Whoever wants to go back writes an older one's name into `latest`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint import manifest as manifests
from pipeline.errors import CheckpointError
from pipeline.files import rename_aside, replace_directory, sync, write_text

LATEST = "latest"
DAMAGED = ".damaged"
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The steps that its name speaks of."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, whole or not."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def named_checkpoint(folder: Path) -> Path | None:
    """What `latest` names, there or not; None where it is missing or empty.

    Raises:
        CheckpointError: it names something that is no checkpoint of this folder.
    """
    path = folder / LATEST
    try:
        name = path.read_text(encoding="utf-8", errors="replace").strip().strip("\0")
    except FileNotFoundError:
        return None
    if name and not _NAME.fullmatch(name):
        names = ", ".join(one.name for one in all_checkpoints(folder)) or "which there are none"
        raise CheckpointError(
            f"{path}: names {name!r}, which is no checkpoint there; write the name of one, of {names}"
        )
    return folder / name if name else None


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where nothing was saved yet.

    Raises:
        CheckpointError: it names none that is there.
    """
    named = named_checkpoint(folder)
    if named is not None and not (named / manifests.NAME).exists():
        others = ", ".join(path.name for path in all_checkpoints(folder) if path != named) or "which there are none"
        raise CheckpointError(
            f"{folder / LATEST}: names {named.name}, which is not whole; write another name, of {others}"
        )
    return named


def candidates(folder: Path) -> list[Path]:
    """What to go on from, the first choice first: the one that `latest` names, then those before it.

    Raises:
        CheckpointError: as `named_checkpoint`.
    """
    named = named_checkpoint(folder)
    found = all_checkpoints(folder)
    if named is not None:
        found = [path for path in found if step_of(path) <= step_of(named)]
    return found[::-1]


def holds_damaged(folder: Path) -> bool:
    """Whether a checkpoint was set aside there."""
    return any(folder.glob(f"step_*{DAMAGED}*"))


def set_aside(checkpoint: Path) -> Path:
    """Takes a damaged checkpoint out of the row without losing what is left of it; returns its new place."""
    aside = checkpoint.with_name(checkpoint.name + DAMAGED)
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}{DAMAGED}.{number}")
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def publish(partial: Path, final: Path) -> None:
    """Gives a whole checkpoint its name, and then `latest` that name."""
    # An attempt that was killed, or rolled back, took the same steps. Its checkpoint goes aside, and away at last.
    replaced = replace_directory(partial, final)
    point_to(final)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(checkpoint: Path) -> None:
    """Makes `latest` name it."""
    write_text(checkpoint.parent / LATEST, checkpoint.name + "\n")


def superseded(steps: Sequence[int], newest: int, keep_last: int, keep_every_steps: int | None) -> list[int]:
    """Which of the checkpoints after these `steps`, in rising order, the one after `newest` makes superfluous.

    Later ones, of an attempt that was rolled back, stay until a save takes their place.
    """
    old = [step for step in steps if step <= newest][:-keep_last]
    return [step for step in old if keep_every_steps is None or step % keep_every_steps != 0]


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint. It loses its name first, so that a kill cannot leave half of it behind as a whole one."""
    shutil.rmtree(rename_aside(checkpoint), ignore_errors=True)


def unfinished(final: Path) -> Path:
    """Where a checkpoint lies until it is whole."""
    return final.with_name(f".{final.name}.partial")


def make_empty(folder: Path) -> None:
    """A new folder in the place of whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def remove_unfinished(folder: Path) -> None:
    """Clears what killed processes left half-written or half-deleted."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)
