"""Text in every script that Unicode has, as words of its letters: many have no other source here."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator

from studies.gate_negatives.records import Record, generator, joined

WORDS = 40
"""How many words a script has."""
LEAST_LETTERS = 16
LARGE = 500
"""Scripts with more letters than this are drawn from several times as often."""
# Historic blocks of thousands of signs, which nobody types; CJK has a name for each sign.
_LEFT_OUT = (
    "CUNEIFORM",
    "EGYPTIAN",
    "ANATOLIAN",
    "TANGUT",
    "NUSHU",
    "KHITAN",
    "BAMUM",
    "SIGNWRITING",
)
_LETTERS = ("Lu", "Ll", "Lo", "Lt", "Mn", "Mc")


def script_records() -> Iterator[Record]:
    """Records of each script, and of Latin letters with diacritics."""
    for script, letters in letters_by_script().items():
        rng = generator(f"script {script}")
        times = 3 if len(letters) > LARGE else 1
        words = [_word(letters, rng) for _ in range(times * WORDS)]
        for text in joined(words, " ", times * WORDS * 10, rng):
            yield Record(f"script:{script}", text)


def letters_by_script() -> dict[str, list[str]]:
    """The letters and marks of each script, by the first word of their names."""
    scripts: dict[str, list[str]] = {}
    for code in range(0x80, 0x20000):
        letter = chr(code)
        name = unicodedata.name(letter, "")
        is_compatible = unicodedata.decomposition(letter).startswith("<")
        if unicodedata.category(letter) in _LETTERS and name and not is_compatible:
            scripts.setdefault(name.split()[0].split("-")[0], []).append(letter)
    return {
        script.capitalize(): letters
        for script, letters in sorted(scripts.items())
        if len(letters) >= LEAST_LETTERS and script not in _LEFT_OUT
    }


def _word(letters: list[str], rng: random.Random) -> str:
    """Two to eight letters; neighbours in the table are neighbours in the alphabet."""
    first = rng.randrange(len(letters))
    word: list[str] = []
    for _ in range(rng.randint(2, 8)):
        near = (first + rng.randrange(-40, 41)) % len(letters)
        word.append(letters[near])
    # NFC, as texts are.
    return unicodedata.normalize("NFC", "".join(word))
