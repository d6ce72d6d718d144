"""A disk that is full or read-only: a small tmpfs, and a file that fills it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

_BALLAST = "ballast"


class SmallDisk:
    """A tmpfs mounted at `path`."""

    def __init__(self, path: Path, mib: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip("mounting a small disk needs root")

    def fill(self) -> None:
        fill(self.path)

    def free(self) -> None:
        free(self.path)

    def grow(self, mib: int) -> None:
        """Changes its size."""
        subprocess.run(["mount", "-o", f"remount,size={mib}m", str(self.path)], check=True)

    def make_read_only(self) -> None:
        """Nothing on it can be written from now on, not by root either."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def remove(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def fill(disk: Path) -> None:
    """Takes all space that is left."""
    with (disk / _BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.sysconf("SC_PAGESIZE")))


def free(disk: Path) -> None:
    """Releases the space that `fill` took."""
    (disk / _BALLAST).unlink()
