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


@dataclass(frozen=True)
class Subject:
    """One reader of one kind of input.

    Attributes:
        target: the row of the table that it belongs to.
        name: its name among the target's.
        make: writes the sound input to `INPUT`, and other files that the reader needs beside it.
        read: reads it as the project does; returns digests of what it read, by name.
        exact: whether the project promises to notice any change. Then each digest must be that of the sound input.
        damage: damages the folder; returns what it did.
        truth: reads all that may be read of the sound input; default: `read`.
    """

    target: str
    name: str
    make: Callable[[], None]
    read: Callable[[], Mapping[str, str] | None]
    exact: bool = False
    damage: Callable[[Path, random.Random], str] = damage_any
    truth: Callable[[], Mapping[str, str]] | None = None


def digest(parts: Iterable[bytes]) -> str:
    """A hash of `parts`."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
