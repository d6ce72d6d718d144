"""The names of a run's checkpoints, and the file `latest`, which says where the run resumes."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config.sources import CHECKPOINTS
from pipeline.errors import CheckpointError, UserError
from pipeline.files.reading import read_bytes

LATEST = "latest"
# At most 15 digits: every step is exact in JSON, and no name is too long for a file system.
_NAME = re.compile(r"step_(\d{8,15})", re.ASCII)


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_in(name: str) -> int | None:
    """The number of steps in a checkpoint's name; None if it is not one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1])


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, complete or not."""
    found: list[tuple[int, Path]] = []
    for path in folder.glob("step_*"):
        step = step_in(path.name)
        if step is not None and path.is_dir():
            # Sorted by number, not by name: names of nine digits come after those of eight.
            found.append((step, path))
    return [path for _, path in sorted(found)]


def named_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, whether it exists or not.

    None if that file is missing or empty.

    Raises:
        CheckpointError: it holds something else than a checkpoint's name, or cannot be read.
    """
    path = folder / LATEST
    try:
        content = read_bytes(path, CheckpointError, "write a checkpoint's name into it")
    except FileNotFoundError:
        return None
    # A crash of the machine may leave a file of null bytes.
    name = content.decode(errors="replace").strip().strip("\0")
    if not name:
        return None
    if step_in(name) is None:
        raise CheckpointError(f"{path}: names {name[:80]!r}; write a checkpoint's name into it")
    return folder / name


def newest_checkpoint_step(run: Path) -> int:
    """The step of the checkpoint from which the run in the folder `run` would resume.

    0 if there is none.
    """
    folder = run / CHECKPOINTS
    try:
        named = named_checkpoint(folder)
    except UserError:  # resuming reports it
        named = None
    last: int | None = None
    if named is not None:
        last = step_in(named.name)
    newest = 0
    for path in all_checkpoints(folder):
        step = step_in(path.name) or 0
        was_rolled_back = last is not None and step > last
        if not was_rolled_back and (path / "manifest.json").exists():
            newest = max(newest, step)
    return newest
