"""Cutting documents that are longer than a model's context, so that every token is scored exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """The tokens [start, stop) of a sequence, of which those from `first_scored` on count."""

    start: int
    stop: int
    first_scored: int


def windows(length: int, context: int, stride: int, first_scored: int = 1) -> Iterator[Window]:
    """Windows over a sequence of `length` tokens, of which those before `first_scored`, at least one, are only read.

    Each begins `stride` tokens after the one before it, and scores what that one did not. So every scored token sees at
    least `context - stride` tokens before it, or all there are.
    """
    start = 0
    scored = first_scored
    while scored < length:
        stop = min(start + context, length)
        if stop > scored:
            yield Window(start, stop, scored)
            scored = stop
        start += stride
