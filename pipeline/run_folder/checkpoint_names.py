"""The names of a run's checkpoints, and the file `latest`, which says where the run resumes."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config.sources import CHECKPOINTS
from pipeline.errors import CheckpointError, UserError
from pipeline.files import read_bytes

LATEST = "latest"
# At most 15 digits: every step is exact in JSON, and no name is too long for a file system.
_NAME = re.compile(r"step_(\d{8,15})", re.ASCII)


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_in(name: str) -> int | None:
    """The number of steps in a checkpoint's name; None if it is not one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, complete or not."""
    found = (
        path for path in folder.glob("step_*") if step_in(path.name) is not None and path.is_dir()
    )
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def named_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, whether it exists or not; None if that file is missing or
    empty.
    """
    path = folder / LATEST
    try:
        content = read_bytes(path, CheckpointError, "write a checkpoint's name into it")
    except FileNotFoundError:
        return None
    name = content.decode(errors="replace").strip().strip("\0")
    if name and step_in(name) is None:
        raise CheckpointError(f"{path}: names {name[:80]!r}; write a checkpoint's name into it")
    return folder / name if name else None


def newest_checkpoint_step(run: Path) -> int:
    """The step of the checkpoint from which the run in the folder `run` would resume; 0 if there is
    none.
    """
    try:
        named = named_checkpoint(run / CHECKPOINTS)
    except UserError:  # resuming reports it
        named = None
    last = None if named is None else step_in(named.name)
    complete = (
        path for path in all_checkpoints(run / CHECKPOINTS) if (path / "manifest.json").exists()
    )
    steps = (step_in(path.name) or 0 for path in complete)
    return max(
        (step for step in steps if last is None or step <= last), default=0
    )  # later ones were rolled back
