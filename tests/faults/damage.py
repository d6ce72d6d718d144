"""Damage to a complete checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.job import Job

Damage = Callable[[Path], None]
"""Damages a checkpoint's folder."""


def truncate(checkpoint: Path) -> None:
    """Removes the second half of a file."""
    file = _of_rank(checkpoint, 1)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def flip_bit(checkpoint: Path) -> None:
    """Flips a random bit of a file (seed 5)."""
    file = _of_rank(checkpoint, 0)
    content = bytearray(file.read_bytes())
    place = random.Random(5).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)


def lose_file(checkpoint: Path) -> None:
    """Removes the file of rank 1."""
    _of_rank(checkpoint, 1).unlink()


def done_to_the_newest(damage: Damage) -> Callable[[Job], int]:
    """Damages a job's newest checkpoint; returns the step of the one before, from which the run must resume."""

    def strike(job: Job) -> int:
        *_, before, newest = job.run.checkpoints
        damage(job.run.checkpoints[newest])
        return before

    return strike


def _of_rank(checkpoint: Path, rank: int) -> Path:
    (file,) = checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file
