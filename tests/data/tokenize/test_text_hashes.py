"""The fast ways to hash a text give what splitting it gives."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from unicodedata import normalize

import pytest

from pipeline.data.tokenize import text_hashes
from pipeline.data.tokenize.text_hashes import hash_of_letters, hash_of_words
from tests.data.helpers import documents, stories

BLANKS = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]


def digest(content: str) -> bytes:
    return blake2b(content.encode(errors="replace"), digest_size=8).digest()


def test_all_white_space_of_unicode_is_known():
    assert text_hashes._BLANKS == BLANKS


@pytest.mark.parametrize("length", [5, 3000])
def test_hashes_are_those_of_a_split_text(length: int):
    draw = random.Random(length)
    letters = ["a", "B", "é", "e\u0301", "한", normalize("NFD", "한"), "’", "𐍈", "\ud800", "  "]
    alphabets = [["a", "b", " ", "\n", "\t"], ["한", "글", " "], letters + BLANKS]
    made = ["".join(draw.choices(draw.choice(alphabets), k=length)) for _ in range(300)]
    for text in [*made, *documents(20), *stories(10), "", " ", "a" * length, " " * length]:
        words = normalize("NFC", text).split()
        utf8 = text.encode(errors="replace")
        for known in (None, utf8):
            assert hash_of_words(text, known) == digest(" ".join(words))
            assert hash_of_letters(text, known) == digest("".join(words))
