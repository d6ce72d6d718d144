"""The pieces of a BPE tokenizer.json, and the same file with more pieces.

New ids begin at a given row. Ids below it that the tokenizer does not have become unused pieces, so that every library
counts the ids alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from pipeline.data.merges import Word
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_object

SPACE = "▁"
"""How pieces of characters spell a space."""
# A word that spans no space is longer only in scripts without spaces; a merge across this many pieces is not learned.
_LONGEST_WORD = 32
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class NewPiece(NamedTuple):
    """A piece to be added, as the file spells it, and the ids of the old pieces that it replaces.

    `pair` are the spellings of the two that it merges, if it does.
    """

    string: str
    replaces: list[int]
    pair: tuple[str, str] | None = None


@dataclass(frozen=True)
class Pieces:
    """A tokenizer's pieces.

    Attributes:
        described: the content of its file.
        library: the tokenizer.
        kind: how it cuts: "byte-level BPE", by merges of bytes; "BPE", of characters, others becoming bytes.
        strings: the pieces of text by id, as the file spells them.
        raw: their UTF-8, which may be part of a character.
        bytes_of: the byte pieces by id, where characters without a piece become bytes.
    """

    described: dict[str, Any]
    library: tokenizers.Tokenizer
    kind: str
    strings: dict[int, str]
    raw: dict[int, bytes]
    bytes_of: dict[int, int]

    def normalize(self, text: str) -> str:
        """What the tokenizer makes of a text before it cuts it."""
        normalizer = self.library.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def words(self, texts: Sequence[str]) -> Iterator[Word]:
        """The ids of texts in stretches that no merge may cross: words begin with their space."""
        with faults_of_library("the tokenizer cannot encode a text", DataError):
            encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            for _, of_word in groupby(zip(encoding.ids, encoding.word_ids, strict=True), lambda token: token[1]):
                ids = [number for number, _ in of_word]
                start = 0
                for at in range(1, len(ids)):
                    begins = ids[at] not in self.bytes_of and self.strings.get(ids[at], SPACE).startswith(SPACE)
                    if begins or at - start == _LONGEST_WORD:
                        yield tuple(ids[start:at])
                        start = at
                yield tuple(ids[start:])

    def extended(self, first: int, new: Sequence[NewPiece]) -> dict[str, Any]:
        """The file's content with further pieces, the first with the id `first`."""
        model = self.described["model"]
        entries = {int(token["id"]): str(token["content"]) for token in self.described.get("added_tokens") or ()}
        entries |= {number: piece for piece, number in model["vocab"].items()}
        # A piece for every id below: `tokenizers` would give an added token without one another id than its own. No
        # piece of a text has a space, which is spelled otherwise there.
        below = [entries.get(number, f"<unused {number}>") for number in range(first)]
        vocabulary = {piece: number for number, piece in enumerate([*below, *(piece.string for piece in new)])}
        in_one = bool(model["merges"]) and isinstance(model["merges"][0], str)
        pairs = [piece.pair for piece in new if piece.pair is not None]
        merges = [*model["merges"], *((" ".join(pair) if in_one else list(pair)) for pair in pairs)]
        return {**self.described, "model": {**model, "vocab": vocabulary, "merges": merges}}


def read_pieces(file: Path) -> Pieces:
    """The pieces of the tokenizer in `file`, which `load_tokenizer` has accepted.

    Raises:
        DataError: it is of a kind that cannot be extended.
    """
    if file.suffix == ".model":
        raise DataError(f"{file}: expected a tokenizer.json, found a SentencePiece model; convert it by transformers")
    described = read_object(file, DataError)
    model: dict[str, Any] = described["model"]
    byte_level = "ByteLevel" in _kinds_in(described.get("pre_tokenizer")) | _kinds_in(described.get("normalizer"))
    unusual = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
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
    raw, bytes_of = _raw_byte_level(strings) if byte_level else _raw(strings)
    return Pieces(
        described=described,
        library=library,
        kind="byte-level BPE" if byte_level else "BPE",
        strings={number: strings[number] for number in raw},
        raw=raw,
        bytes_of=bytes_of,
    )


def _kinds_in(part: Any) -> set[str]:  # noqa: ANN401
    """The types of a pre-tokenizer or normalizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part.get("type"))}.union(*map(_kinds_in, inner))


def _raw(strings: dict[int, str]) -> tuple[dict[int, bytes], dict[int, int]]:
    """The UTF-8 of pieces of characters, and the byte pieces apart from them."""
    bytes_of = {number: int(byte[1], 16) for number, piece in strings.items() if (byte := _BYTE_PIECE.fullmatch(piece))}
    found = {number: piece.replace(SPACE, " ").encode() for number, piece in strings.items() if number not in bytes_of}
    return found, bytes_of


def _raw_byte_level(strings: dict[int, str]) -> tuple[dict[int, bytes], dict[int, int]]:
    """The bytes of pieces in GPT-2's alphabet of printable characters, a character for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return {
        number: bytes(byte_of[character] for character in string)
        for number, string in strings.items()
        if all(character in byte_of for character in string)
    }, {}
