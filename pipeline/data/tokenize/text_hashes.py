"""Hashes of a text that its copies share which differ in white space, or in the form of Unicode,
alone.

Both hashes decide what corpora hold: the hash of the words which documents are held out, the hash
of the letters which are copies. So their values must stay what `str.split` makes of a text in
Unicode's NFC, which is the slow way here. The fast ways work on UTF-8, and take a fifth of the
time.
"""

from __future__ import annotations

from hashlib import blake2b
from unicodedata import normalize

import numpy as np

# The last white space of Unicode, the ideographic one of Chinese and Japanese.
_LAST_BLANK = 0x3000
_BLANKS = [chr(code) for code in range(_LAST_BLANK + 1) if chr(code).isspace()]
_WIDE_BLANKS = [blank for blank in _BLANKS if not blank.isascii()]
_ASCII_BLANKS = "".join(filter(str.isascii, _BLANKS)).encode()
_TO_SPACES = bytes.maketrans(_ASCII_BLANKS, b" " * len(_ASCII_BLANKS))
# Characters up to which splitting a text is faster than the calls of numpy.
_SHORT = 1024


def hash_of_words(text: str, utf8: bytes | None = None) -> bytes:
    """Eight bytes of the words of `text`, whatever white space is between them.

    `utf8`: the text in UTF-8, where the caller has it.
    """
    composed = normalize("NFC", text)
    if len(text) > _SHORT and _has_only_ascii_blanks(text, composed):
        words = _joined_words(_encoded(text) if utf8 is None else utf8)
    else:
        words = _encoded(" ".join(composed.split()))
    return _digest(words)


def hash_of_letters(text: str, utf8: bytes | None = None) -> bytes:
    """Eight bytes of `text` without its white space. `utf8` is as in `hash_of_words`."""
    composed = normalize("NFC", text)
    if _has_only_ascii_blanks(text, composed):
        letters = (_encoded(text) if utf8 is None else utf8).translate(None, _ASCII_BLANKS)
    else:
        letters = _encoded("".join(composed.split()))
    return _digest(letters)


def _has_only_ascii_blanks(text: str, composed: str) -> bool:
    """Whether `text` is in NFC, as its form `composed` is, and all its white space is ASCII."""
    if text.isascii():
        return True
    # Python returns the same string for a text that its quick check finds in NFC.
    return composed is text and not any(blank in text for blank in _WIDE_BLANKS)


def _joined_words(utf8: bytes) -> bytes:
    """A text whose white space is ASCII, with one space between each two words."""
    spaced = utf8.translate(_TO_SPACES)
    is_space = np.frombuffer(spaced, np.uint8) == ord(" ")
    is_kept = ~is_space
    # Of each run of spaces the first is kept: the one whose byte before it is no space.
    is_kept[1:] |= ~is_space[:-1]
    kept = np.frombuffer(spaced, np.uint8)[is_kept]
    return kept.tobytes().strip(b" ")


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=8).digest()
