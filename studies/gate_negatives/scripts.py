"""Text in every script that Unicode has, as words of its letters: many have no other source here."""

from __future__ import annotations

import random
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

from studies.gate_negatives.records import Record, generator, joined

WORDS = 40
"""How many words a script has."""
LEAST_LETTERS = 16
FEW_LANGUAGES = 2
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


def script_records(languages: Sequence[Record]) -> Iterator[Record]:
    """Records of each script, but for those that only one or two of the `languages` write.

    Random letters of such a script, as Hangul, would be negatives in the very letters of a new
    language, while the language itself is found by its text and left out.
    """
    writers = languages_by_script(languages)
    for script, letters in letters_by_script().items():
        if 0 < writers[script] <= FEW_LANGUAGES:
            continue
        rng = generator(f"script {script}")
        times = 3 if len(letters) > LARGE else 1
        words = [_word(letters, rng) for _ in range(times * WORDS)]
        for text in joined(words, " ", times * WORDS * 10, rng):
            yield Record(f"script:{script}", text)


def languages_by_script(languages: Sequence[Record]) -> Counter[str]:
    """How many kinds write a script: it has a fifth of their letters or more."""
    letters: dict[str, Counter[str]] = {}
    for record in languages:
        found = letters.setdefault(record.kind, Counter())
        for character in record.text:
            if unicodedata.category(character) in _LETTERS:
                found[_script_of(character)] += 1
    writers: Counter[str] = Counter()
    for found in letters.values():
        for script, count in found.items():
            if count >= found.total() / 5:
                writers[script] += 1
    return writers


def _script_of(letter: str) -> str:
    """The first word of a letter's name."""
    name = unicodedata.name(letter, "")
    return name.partition(" ")[0].partition("-")[0].capitalize()


def letters_by_script() -> dict[str, list[str]]:
    """The letters and marks of each script, by the first word of their names."""
    scripts: dict[str, list[str]] = {}
    for code in range(0x80, 0x20000):
        letter = chr(code)
        script = _script_of(letter)
        is_compatible = unicodedata.decomposition(letter).startswith("<")
        if unicodedata.category(letter) in _LETTERS and script and not is_compatible:
            scripts.setdefault(script, []).append(letter)
    chosen: dict[str, list[str]] = {}
    for script, letters in sorted(scripts.items()):
        if len(letters) >= LEAST_LETTERS and script.upper() not in _LEFT_OUT:
            chosen[script] = letters
    return chosen


def _word(letters: list[str], rng: random.Random) -> str:
    """Two to eight letters; neighbours in the table are neighbours in the alphabet."""
    first = rng.randrange(len(letters))
    word: list[str] = []
    for _ in range(rng.randint(2, 8)):
        near = (first + rng.randrange(-40, 41)) % len(letters)
        word.append(letters[near])
    # NFC, as texts are.
    return unicodedata.normalize("NFC", "".join(word))
