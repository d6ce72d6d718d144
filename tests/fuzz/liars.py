"""Readers that lie: each does to damaged input what no reader may, and the fuzz must see it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from pipeline.errors import DataError
from tests.fuzz.runner import INPUT, MEMORY_BYTES, Subject

_FILE = INPUT / "file"
_SOUND = "sound " * 1000


def _make() -> None:
    INPUT.mkdir()
    _FILE.write_text(_SOUND, encoding="utf-8")


def _fail(error: Exception) -> None:
    raise error


def _eat_memory() -> None:
    held = bytearray(2 * MEMORY_BYTES)
    assert not held[0]


def _read(answer: Callable[[], object]) -> str:
    """Accepts the sound file; does `answer` with any other, and returns what is in it."""
    content = _FILE.read_bytes() if _FILE.exists() else b""
    if content != _SOUND.encode():
        answer()
    return content.hex()


LIARS: dict[str, tuple[str, Callable[[], object]]] = {
    "an honest reader": ("refused", partial(_fail, DataError(f"{_FILE}: damaged"))),
    "accepts damage": ("silent change", bool),
    "raises a bare traceback": ("traceback", partial(_fail, KeyError("text"))),
    "does not name the file": ("vague", partial(_fail, DataError("damaged"))),
    "hangs": ("hang", partial(time.sleep, 3600)),
    "eats memory": ("memory", _eat_memory),
    "is killed": ("abort", os.abort),
    "ends as if it had read everything": ("abort", partial(os._exit, 0)),
}
"""What readers do with damaged input, by name, and the outcome that the fuzz must report."""


def subjects() -> list[Subject]:
    return [
        Subject(name, "file", _make, partial(_read, act), exact=True)
        for name, (_, act) in LIARS.items()
    ]
