"""Files that a program wrote: reading them, giving them other settings, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_jsonl(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def change_json(file: Path, **entries: Any) -> None:
    """Gives keys of a JSON object other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def flip_bit(file: Path, at: int | None = None) -> None:
    """Flips a bit of the byte at `at`, by default in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    """Removes the second half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
