"""The pieces of a BPE tokenizer.json, and the same file with more pieces.

New ids begin at a given row. Ids below it that the tokenizer does not have become unused pieces, so that every library
counts the ids alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from pipeline.data.tokenizer.extension.merges import Pair, Word
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_object

SPACE = "▁"
"""How pieces of characters spell a space."""
# A word that spans no space is longer only in scripts without spaces; a merge across this many pieces is not learned.
_LONGEST_WORD = 32
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
)
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# GPT-2's alphabet of printable characters, a character for each byte.
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}


def byte_pieces(*, is_byte_level: bool, has_fallback: bool) -> Iterator[list[str]]:
    """The pieces of the bytes of UTF-8, in each of the ways in which a tokenizer may spell any text by them."""
    if is_byte_level:
        yield [piece for piece, byte in _BYTE_OF.items() if byte not in _NOT_IN_UTF8]
    if has_fallback:
        yield [f"<0x{byte:02X}>" for byte in range(256) if byte not in _NOT_IN_UTF8]


@dataclass(frozen=True)
class Pieces:
    """A tokenizer's pieces."""

    described: dict[str, Any]
    """the content of its file"""
    library: tokenizers.Tokenizer
    byte_level: bool
    """it cuts by merges of bytes; or else of characters, of which those without a piece become bytes"""
    strings: dict[int, str]
    """the pieces of text by id, as the file spells them"""
    bytes_of: dict[int, int]
    """the byte pieces by id, where characters without a piece become bytes"""

    def raw(self, string: str) -> bytes:
        """The UTF-8 of a piece, which may be part of a character."""
        return (
            bytes(_BYTE_OF[one] for one in string)
            if self.byte_level
            else string.replace(SPACE, " ").encode()
        )

    def normalize(self, text: str) -> str:
        """What the tokenizer makes of a text before it cuts it."""
        normalizer = self.library.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def words(self, texts: Sequence[str]) -> Iterator[Word]:
        """The pieces of texts in stretches that no merge may cross: words begin with their space."""
        with faults_of_library("the tokenizer cannot encode a text", DataError):
            encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            for _, of_word in groupby(
                zip(encoding.ids, encoding.word_ids, strict=True), lambda token: token[1]
            ):
                word: list[str] = []
                for piece in self._spelled(number for number, _ in of_word):
                    if word and (
                        not piece or piece.startswith(SPACE) or len(word) == _LONGEST_WORD
                    ):
                        yield tuple(word)
                        word = []
                    word.append(piece)
                yield tuple(word)

    def _spelled(self, ids: Iterable[int]) -> Iterator[str]:
        """The spellings of ids, with characters in place of the byte pieces that spell them; "" of what is no text."""
        for is_byte, run in groupby(ids, self.bytes_of.__contains__):
            if is_byte:
                yield from bytes(self.bytes_of[number] for number in run).decode(errors="replace")
            else:
                yield from (self.strings.get(number, "") for number in run)

    def extended(self, first: int, new: Iterable[str], merges: Sequence[Pair]) -> dict[str, Any]:
        """The file's content with further pieces, the first with the id `first`, and further merges."""
        model = self.described["model"]
        entries = {
            int(token["id"]): str(token["content"])
            for token in self.described.get("added_tokens") or ()
        }
        entries |= {number: piece for piece, number in model["vocab"].items()}
        # A piece for every id below: `tokenizers` would give an added token without one another id than its own. No
        # piece of a text has a space, which is spelled otherwise there.
        below = [entries.get(number, f"<unused {number}>") for number in range(first)]
        vocabulary = {piece: number for number, piece in enumerate([*below, *new])}
        in_one = bool(model["merges"]) and isinstance(model["merges"][0], str)
        added = [" ".join(pair) if in_one else list(pair) for pair in merges]
        return {
            **self.described,
            "model": {**model, "vocab": vocabulary, "merges": [*model["merges"], *added]},
        }


def read_pieces(file: Path) -> Pieces:
    """The pieces of the tokenizer in `file`, which `load_tokenizer` has accepted.

    Raises DataError where it is of a kind that cannot be extended.
    """
    described = read_object(file, DataError)
    model: dict[str, Any] = described["model"]
    if model.get("type") == "Unigram":
        raise DataError(
            f"{file}: a Unigram tokenizer, which weighs all cuts of a text: new pieces would change how old "
            "ones are cut, so it cannot be extended; train on it as it is, without `vocabulary`, or take a "
            "base whose tokenizer is BPE (scale-cpt tokenizer --compare --report-on shows how many tokens each needs)"
        )
    byte_level = "ByteLevel" in _kinds_in(described.get("pre_tokenizer")) | _kinds_in(
        described.get("normalizer")
    )
    unusual = [
        key
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]
    if model.get("type") != "BPE" or unusual or not (byte_level or model.get("byte_fallback")):
        raise DataError(
            f"{file}: expected BPE over bytes or with byte_fallback, without {', '.join(unusual) or 'unknown pieces'}, "
            f"found {model.get('type')!r}; it cannot be extended"
        )
    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    library.no_padding()
    added = {int(token["id"]) for token in described.get("added_tokens") or ()}
    strings = {number: piece for piece, number in model["vocab"].items() if number not in added}
    bytes_of: dict[int, int] = {}
    if byte_level:
        strings = {
            number: piece
            for number, piece in strings.items()
            if all(one in _BYTE_OF for one in piece)
        }
    else:
        matches = {number: _BYTE_PIECE.fullmatch(piece) for number, piece in strings.items()}
        bytes_of = {number: int(found[1], 16) for number, found in matches.items() if found}
        strings = {number: piece for number, piece in strings.items() if number not in bytes_of}
    return Pieces(described, library, byte_level, strings, bytes_of)


def _kinds_in(part: Any) -> set[str]:
    """The types of a pre-tokenizer or normalizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part.get("type"))}.union(*map(_kinds_in, inner))
