"""What a stranger, or a damaged disk, may have put in the place of a small file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

LEVELS = 100_000


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


PLACES: Mapping[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": _device,
    "a loop": _loop,
    "a huge file": _huge,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 9),
    "a number": lambda path: path.write_text("9" * 25),
    "deep": lambda path: path.write_text("[" * LEVELS + "]" * LEVELS),
    "deep objects": lambda path: path.write_text('{"a":' * 500 + "1" + "}" * 500),
}


def replace_by(kind: str, path: Path) -> None:
    """Puts one of `PLACES` where the file `path` was."""
    path.unlink(missing_ok=True)
    PLACES[kind](path)
