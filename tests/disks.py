"""A real disk that is really full: a small tmpfs, with a file in it that takes what is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

_BALLAST = "ballast"


class SmallDisk:
    """A file system of its own, mounted at `path`."""

    def __init__(self, path: Path, mib: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip("mounting a small disk needs root")

    def fill(self) -> None:
        """Leaves no room."""
        fill(self.path)

    def free(self) -> None:
        """Gives the room back."""
        free(self.path)

    def grow(self, mib: int) -> None:
        """Makes it so large."""
        subprocess.run(["mount", "-o", f"remount,size={mib}m", str(self.path)], check=True)

    def remove(self) -> None:
        """Ends it."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def fill(disk: Path) -> None:
    """Takes all the room that is left on a small disk."""
    with (disk / _BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.sysconf("SC_PAGESIZE")))


def free(disk: Path) -> None:
    """Gives the room back."""
    (disk / _BALLAST).unlink()
