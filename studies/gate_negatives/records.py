"""Records of a kind, and how short texts become records of different lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

LENGTHS = (40, 80, 160, 320)
"""About how many characters a record has: a gate sees sentences as well as paragraphs."""


class Record(NamedTuple):
    """A text of one kind: a language (`fr`), a script (`script:Cherokee`), or another (`tables`)."""

    kind: str
    text: str


def generator(kind: str) -> random.Random:
    """The random numbers of a kind: they do not depend on which other kinds there are."""
    return random.Random(f"gate negatives: {kind}")


def joined(pieces: Sequence[str], separator: str, characters: int, rng: random.Random) -> list[str]:
    """Texts of LENGTHS in turn, each of as many pieces as it takes; `characters` in all.

    A record ends where the pieces do, so there may be fewer characters.
    """
    texts: list[str] = []
    left = characters
    rest = list(pieces)
    rng.shuffle(rest)
    while rest and left > 0:
        wanted = LENGTHS[len(texts) % len(LENGTHS)]
        taken = [rest.pop()]
        while rest and len(separator.join(taken)) < wanted:
            taken.append(rest.pop())
        texts.append(separator.join(taken))
        left -= len(texts[-1])
    return texts
