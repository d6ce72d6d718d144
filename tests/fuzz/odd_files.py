"""Oddities of a file system in place of a file or folder: a FIFO, a link to a device, a loop, a sparse file."""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path

SPARSE_BYTES = 16 * 2**30


def make_odd(path: Path, draw: random.Random) -> str:
    """Replaces `path`, a file or folder, by something odd; returns what was done."""
    name = draw.choice(list(_ODDITIES))
    _ODDITIES[name](path)
    return f"{path}: {name}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    _remove(path)
    path.touch()


def _folder(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _fifo(path: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def _socket(path: Path) -> None:
    _remove(path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _link(path: Path, to: str) -> None:
    _remove(path)
    path.symlink_to(to)


def _link_to_a_folder(path: Path) -> None:
    elsewhere = Path("elsewhere").absolute()
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "file").write_text("another's")
    _link(path, str(elsewhere))


def _moved_behind_a_link(path: Path) -> None:
    path.rename(path.with_name(path.name + ".moved"))
    path.symlink_to(path.name + ".moved")


def _sparse(path: Path) -> None:
    if not path.is_dir():
        os.truncate(path, SPARSE_BYTES)


def _hollow(path: Path) -> None:
    _empty(path)
    os.truncate(path, SPARSE_BYTES)


_ODDITIES = {
    "removed": _remove,
    "empty": _empty,
    "a folder": _folder,
    "a FIFO": _fifo,
    "a socket": _socket,
    "a link to /dev/zero": lambda path: _link(path, "/dev/zero"),
    "a link to /dev/full": lambda path: _link(path, "/dev/full"),
    "a link to /proc/self/mem": lambda path: _link(path, "/proc/self/mem"),
    "a link to a folder": _link_to_a_folder,
    "a dangling link": lambda path: _link(path, "nowhere"),
    "a link to itself": lambda path: _link(path, path.name),
    "moved behind a link": _moved_behind_a_link,
    "extended to a sparse file": _sparse,
    "an empty sparse file": _hollow,
}
