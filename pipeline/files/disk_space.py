"""Free and used bytes on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """`path`, or the first folder above it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def free_bytes(path: Path) -> int:
    """The free bytes, for ordinary users, on the file system of `path`, which need not exist."""
    system = os.statvfs(nearest_existing(path))
    return system.f_bavail * system.f_frsize


def held_bytes(folder: Path) -> int:
    """The bytes of all files in `folder`; 0 where there is no such folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove files meanwhile
            if path.is_file():
                total += path.stat().st_size
    return total
