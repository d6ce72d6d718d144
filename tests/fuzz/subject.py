"""What is fuzzed: a sound input, how it is damaged, and the reader that must accept or refuse it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.damage import damage_any

INPUT = Path("input")
"""What is damaged. Everything is relative to a subject's own folder, so that copies of it hold the same bytes."""
POOL = Path("pool")
"""Odd files that a subject's damage may put in place of its own."""

Damage = Callable[[Path, Path, random.Random], str]
"""Damages the first folder, perhaps with files of the second; returns what it did."""


class SilentChangeError(Exception):
    """An input was accepted, and what was read is not what it holds."""


@dataclass(frozen=True)
class Subject:
    """One reader of one kind of input.

    Attributes:
        target: the row of the table that it belongs to.
        name: its name among the target's.
        make: writes the sound input to `INPUT`, and other files that the reader needs beside it.
        read: reads it as the project does; returns digests of what it read, by name.
        exact: whether the project promises to notice any change. Then each digest must be that of the sound input.
        damage: default: any damage to any file.
        truth: reads all that may be read of the sound input; default: `read`.
    """

    target: str
    name: str
    make: Callable[[], None]
    read: Callable[[], Mapping[str, str]]
    exact: bool = False
    damage: Damage = damage_any
    truth: Callable[[], Mapping[str, str]] | None = None


def digest(parts: Iterable[bytes]) -> str:
    """A hash of `parts`."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """A hash of the names and contents of files; what is no regular file counts as missing."""
    parts = []
    for path in paths:
        regular = path.is_file() and path.stat().st_size < 2**28
        parts += [str(path).encode(), path.read_bytes() if regular else b"\0missing"]
    return digest(parts)
