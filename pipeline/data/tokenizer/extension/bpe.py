"""The tokens and merges of a BPE tokenizer.json, and the same file with more of them.

New ids begin at a given row. Ids below it that the tokenizer does not have become unused tokens, so
that every library counts the ids alike.
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
from pipeline.files.json_files import read_object

SPACE = "▁"
"""How a tokenizer whose tokens are characters spells a space."""
# A word that spans no space is longer only in scripts without spaces; a merge across so many tokens
# is not learned.
_LONGEST_WORD = 32
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# Settings of BPE that change how a token is spelled, or cut a text at random.
_UNSUPPORTED_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


def _gpt2_alphabet() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet (`bytes_to_unicode` of openai/gpt-2).

    Printable characters of Latin-1 are their own bytes; the other bytes are, in order, the
    characters from U+0100 on.
    """
    byte_of: dict[str, int] = {}
    for first, last in (("!", "~"), ("¡", "¬"), ("®", "ÿ")):
        for byte in range(ord(first), ord(last) + 1):
            byte_of[chr(byte)] = byte
    printable = set(byte_of.values())
    next_character = 0x100
    for byte in range(256):
        if byte not in printable:
            byte_of[chr(next_character)] = byte
            next_character += 1
    return byte_of


_BYTE_OF = _gpt2_alphabet()


def byte_tokens(*, is_byte_level: bool, has_fallback: bool) -> Iterator[list[str]]:
    """The tokens of the bytes of UTF-8, in each way in which a tokenizer may spell any text."""
    if is_byte_level:
        yield [character for character, byte in _BYTE_OF.items() if byte not in _NOT_IN_UTF8]
    if has_fallback:
        yield [f"<0x{byte:02X}>" for byte in range(256) if byte not in _NOT_IN_UTF8]


@dataclass(frozen=True)
class BpeTokens:
    """The tokens of a BPE tokenizer.json, and how it cuts texts into them."""

    described: dict[str, Any]
    """The content of the file."""
    library: tokenizers.Tokenizer
    byte_level: bool
    """Whether the tokens are made of bytes.

    Else they are made of characters, and a character that is no token becomes the tokens of its
    bytes.
    """
    strings: dict[int, str]
    """The tokens of text by id, as the file spells them."""
    bytes_of: dict[int, int]
    """The tokens of single bytes by id; empty if `byte_level`."""

    def raw(self, string: str) -> bytes:
        """The UTF-8 of a token, which may be part of a character."""
        if self.byte_level:
            return bytes(_BYTE_OF[character] for character in string)
        return string.replace(SPACE, " ").encode()

    def normalize(self, text: str) -> str:
        """What the tokenizer makes of a text before it cuts it."""
        normalizer = self.library.normalizer
        if normalizer is None:
            return text
        return str(normalizer.normalize_str(text))

    def words(self, texts: Sequence[str]) -> Iterator[Word]:
        """The tokens of texts in stretches that no merge may cross.

        Words begin with their space.
        """
        with faults_of_library("the tokenizer cannot encode a text", DataError):
            encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            # Ids with the number of their pre-tokenizer's word.
            numbered = zip(encoding.word_ids, encoding.ids, strict=True)
            for _, of_word in groupby(numbered, lambda pair: pair[0]):
                yield from self._split_at_spaces([number for _, number in of_word])

    def _split_at_spaces(self, ids: Sequence[int]) -> Iterator[Word]:
        """The words of a pre-tokenizer's word.

        That is a whole text where there is no pre-tokenizer.
        """
        word: list[str] = []
        for token in self._spelled(ids):
            begins_word = not token or token.startswith(SPACE) or len(word) == _LONGEST_WORD
            if word and begins_word:
                yield tuple(word)
                word = []
            word.append(token)
        yield tuple(word)

    def _spelled(self, ids: Iterable[int]) -> Iterator[str]:
        """The spellings of ids, with characters in place of the tokens of their bytes.

        What is no text becomes "".
        """
        for is_byte, run in groupby(ids, self.bytes_of.__contains__):
            if is_byte:
                # A run may end within a character, which then is a replacement character.
                yield from bytes(self.bytes_of[number] for number in run).decode(errors="replace")
                continue
            for number in run:
                yield self.strings.get(number, "")

    def extended(self, first: int, new: Iterable[str], merges: Sequence[Pair]) -> dict[str, Any]:
        """The file's content with further tokens, from the id `first` on, and further merges."""
        model = self.described["model"]
        string_of = {number: string for string, number in model["vocab"].items()}
        for token in self.described.get("added_tokens") or ():
            string_of.setdefault(int(token["id"]), str(token["content"]))

        # A token for every id below `first`: `tokenizers` would give an added token that is not in
        # the vocabulary another id than its own. No token of a text has a space, which is spelled
        # otherwise there.
        vocabulary: dict[str, int] = {}
        for number in range(first):
            vocabulary[string_of.get(number, f"<unused {number}>")] = number
        for number, string in enumerate(new, start=first):
            vocabulary[string] = number

        all_merges = list(model["merges"])
        # `tokenizers` wrote merges as one string up to version 0.19, and as pairs since.
        are_strings = bool(all_merges) and isinstance(all_merges[0], str)
        for pair in merges:
            # At the end: BPE applies merges in their order, so that every merge of the base keeps
            # its rank, and old tokens are made as before.
            all_merges.append(" ".join(pair) if are_strings else list(pair))
        return {**self.described, "model": {**model, "vocab": vocabulary, "merges": all_merges}}


def merge_pairs(described: dict[str, Any]) -> Iterator[Pair]:
    """The merges of a BPE tokenizer.json in their order, whether it holds pairs or strings."""
    for merge in described["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def read_bpe_tokens(file: Path) -> BpeTokens:
    """The tokens of the tokenizer in `file`, which `load_tokenizer` has accepted.

    Raises:
        DataError: the tokenizer is of a kind that cannot be extended.
    """
    described = read_object(file, DataError)
    byte_level = _check_extendable(file, described)
    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    library.no_padding()

    # Added tokens, such as special ones, take no part in merges.
    added = {int(token["id"]) for token in described.get("added_tokens") or ()}
    strings: dict[int, str] = {}
    bytes_of: dict[int, int] = {}
    for string, number in described["model"]["vocab"].items():
        if number in added:
            continue
        byte = None if byte_level else _BYTE_TOKEN.fullmatch(string)
        if byte is not None:
            bytes_of[number] = int(byte[1], 16)
        elif not byte_level or _BYTE_OF.keys() >= set(string):
            strings[number] = string
    return BpeTokens(described, library, byte_level, strings, bytes_of)


def _check_extendable(file: Path, described: dict[str, Any]) -> bool:
    """Whether the tokenizer is BPE over bytes. Raises DataError where it cannot be extended."""
    model: dict[str, Any] = described["model"]
    kind = model.get("type")
    if kind == "Unigram":
        raise DataError(
            f"{file}: a Unigram tokenizer, which weighs all cuts of a text: new tokens would "
            "change how old ones are cut, so it cannot be extended; train on it as it is, without "
            "`vocabulary`, or take a base whose tokenizer is BPE (scale-cpt tokenizer --compare "
            "--report-on shows how many tokens each needs)"
        )
    around = _kinds_in(described.get("pre_tokenizer")) | _kinds_in(described.get("normalizer"))
    byte_level = "ByteLevel" in around
    spells_all = byte_level or bool(model.get("byte_fallback"))
    unsupported = [key for key in _UNSUPPORTED_SETTINGS if model.get(key)]
    if kind != "BPE" or unsupported or not spells_all:
        raise DataError(
            f"{file}: expected BPE over bytes or with byte_fallback, without "
            f"{', '.join(unsupported) or 'unknown tokens'}, found {kind!r}; it cannot be extended"
        )
    return byte_level


def _kinds_in(part: Any) -> set[str]:
    """The types of a pre-tokenizer or normalizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part.get("type"))}.union(*map(_kinds_in, inner))
