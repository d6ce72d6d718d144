"""What may lie in the place of a small file that someone else made or copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

PLACES: Mapping[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 9),
    "a number": lambda path: path.write_text("9" * 25),
    "half an object": lambda path: path.write_text('{"a": [1, '),
}


def replace_by(kind: str, path: Path) -> None:
    """Puts one of `PLACES` where the file `path` was."""
    path.unlink(missing_ok=True)
    PLACES[kind](path)
