"""How a tokenizer spells raw text: special tokens in it, and what has no token.

A text that spells a special token, as HTML does `<s>`, is ordinary text unless the user wants the
token. What cannot be spelled becomes the unknown token, or nothing at all where there is none: both
are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from pipeline.data.sources.records import SpecialTokens
from pipeline.data.tokenizer.encoders import (
    Encoded,
    Encoder,
    GigatokenEncoder,
    HuggingFaceEncoder,
    SentencePieceEncoder,
)
from pipeline.data.tokenizer.extension.bpe import byte_tokens
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import DataError
from pipeline.files.json_files import read_object

# A character is encoded behind this one, because some tokenizers begin every text with a space.
_BEFORE = "a"
_MANY_RANGES = 8
"""So many ranges of ids are compared one after the other; more are looked up in a table."""


class Spelled(NamedTuple):
    """The ids of texts, and what was found in them."""

    encoded: Encoded
    special_tokens: int
    """How many special tokens the texts spell."""
    unknown_tokens: int
    """How many of the ids are the unknown token."""
    lost_characters: int
    """How many characters have no id."""


class Speller(Protocol):
    """Encodes raw texts, and counts what is special in them."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """What a text that spells a special token becomes."""

    def spell(self, texts: Sequence[str], utf8: Sequence[bytes] | None = None) -> Spelled:
        """Encodes `texts`; `utf8`: the same texts in UTF-8, where the caller has them.

        Raises:
            DataError: where an id is beyond the vocabulary.
        """

    def tokens_within(self, text: str, ids: npt.NDArray[np.uint32], length: int) -> int:
        """How many of the first `ids` of `text` end within its first `length` characters."""


class SentencePieceSpeller:
    """The speller of a model of SentencePiece, whose library reads no special token in a text."""

    special_tokens: SpecialTokens = "text"

    def __init__(
        self, tokenizer: Tokenizer, reference: SentencePieceEncoder, wanted: SpecialTokens | None
    ) -> None:
        if wanted == "control":
            raise DataError(
                f"{tokenizer.path}: SentencePiece reads special tokens in a text as text; set "
                "special_tokens: text, or write a tokenizer.json: scale-cpt tokenizer --convert "
                f"{tokenizer.path} --output tokenizer.json"
            )
        self._reference = reference
        self._unknown = int(reference.model.processor.unk_id())

    def spell(self, texts: Sequence[str], utf8: Sequence[bytes] | None = None) -> Spelled:
        """Encodes `texts`.

        Every model has an unknown token, so that no character is lost without a trace.
        """
        encoded = self._reference.encode(texts)
        named = 0
        for text in texts:
            for token in self._reference.model.reserved_tokens:
                named += text.count(token)
        unknown = int((encoded.ids == self._unknown).sum())
        return Spelled(encoded, named, unknown, lost_characters=0)

    def tokens_within(self, text: str, ids: npt.NDArray[np.uint32], length: int) -> int:
        """How many of the first `ids` of `text` its first `length` characters have alone.

        The library counts characters of the normalized text, not of the given one.
        """
        alone = self._reference.encode([text[:length]]).ids
        both = min(len(alone), len(ids))
        differing = np.flatnonzero(alone[:both] != ids[:both])
        return int(differing[0]) if len(differing) else both


class TokenizerJsonSpeller:
    """The speller of a tokenizer.json.

    It uses `encoder`, and the reference where a text spells a special token.

    `special_tokens`: what such a text becomes; None: ordinary text where the tokenizer can.

    Raises:
        DataError: it is to be ordinary text, and the tokenizer cannot.
    """

    def __init__(
        self, tokenizer: Tokenizer, encoder: Encoder, special_tokens: SpecialTokens | None
    ) -> None:
        assert isinstance(tokenizer.reference, HuggingFaceEncoder)
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._library = tokenizer.reference.library
        self._special: dict[int, str] = {}
        for number, token in self._library.get_added_tokens_decoder().items():
            if token.special:
                self._special[number] = str(token.content)
        self._unknown = self._unknown_id()
        # All special tokens but the unknown one, which a text also becomes without naming it.
        self._control = sorted({*self._special} - {self._unknown})
        self._control_ranges = _ranges_of(self._control)
        if special_tokens == "text" and not self._can_be_text:
            raise DataError(
                f"{tokenizer.path}: reads {', '.join(self._special.values())} in a text as special "
                "tokens in any case; set special_tokens: control"
            )
        self._as_text = special_tokens != "control" and self._can_be_text
        self._lost_characters: dict[str, bool] = {}

    @property
    def special_tokens(self) -> SpecialTokens:
        """What a text that spells a special token becomes."""
        return "text" if self._as_text else "control"

    def spell(self, texts: Sequence[str], utf8: Sequence[bytes] | None = None) -> Spelled:
        """Encodes `texts`.

        Raises:
            DataError: where an id is beyond the vocabulary.
        """
        if isinstance(self._encoder, GigatokenEncoder):
            encoded = self._encoder.encode(texts, utf8)
        else:
            encoded = self._encoder.encode(texts)
        self._check_ids(encoded)
        is_special = self._is_control(encoded)
        special_tokens = int(np.count_nonzero(is_special))
        unknown_name = None
        if self._count_unknown(encoded) and self._unknown in self._special:
            # Where an unknown token is found, a text may also spell it by its name.
            unknown_name = self._special[self._unknown]
        again: set[int] = set()
        if self._as_text and special_tokens:
            ends = np.cumsum(encoded.lengths)
            # The text of each special token, by the position at which texts end.
            texts_of = np.searchsorted(ends, np.flatnonzero(is_special), side="right")
            # Only these texts are encoded again, by the slower reference: the fast encoder has no
            # such setting.
            again.update(map(int, texts_of))
        if unknown_name is not None:
            for number, text in enumerate(texts):
                count = text.count(unknown_name)
                special_tokens += count
                if count and self._as_text:
                    again.add(number)
        if again:
            encoded = self._as_ordinary_text(texts, encoded, sorted(again))
        return Spelled(encoded, special_tokens, self._count_unknown(encoded), self._lost(texts))

    def tokens_within(self, text: str, ids: npt.NDArray[np.uint32], length: int) -> int:
        """How many of the first `ids` of `text` end within its first `length` characters.

        Raises:
            DataError: the reference gives other ids.
        """
        for as_text in (False, True):
            self._with_offsets.encode_special_tokens = as_text
            encoding = self._with_offsets.encode(text, add_special_tokens=False)
            if encoding.ids == ids.tolist():
                ends = [end for _, end in encoding.offsets]
                return next((at for at, end in enumerate(ends) if end > length), len(ends))
        raise DataError(
            f"{self._encoder.name} and {self._tokenizer.reference.name} differ on {text[:60]!r}; "
            "start again with --reference-only"
        )

    @cached_property
    def _with_offsets(self) -> tokenizers.Tokenizer:
        """The library, with offsets that include the space before a word.

        A post-processor may cut it off, and nothing else of it applies to texts without a frame.
        """
        copy = tokenizers.Tokenizer.from_str(self._library.to_str())
        copy.post_processor = None
        return copy

    def _check_ids(self, encoded: Encoded) -> None:
        """Raises DataError where an id is beyond the vocabulary."""
        size = self._tokenizer.vocab_size
        if len(encoded.ids) and int(encoded.ids.max()) >= size:
            raise DataError(
                f"{self._tokenizer.path}: produced the id {encoded.ids.max()}, but has a "
                f"vocabulary of {size}"
            )

    def _is_control(self, encoded: Encoded) -> npt.NDArray[np.bool_]:
        """Which ids are special tokens, other than the unknown one: bool [sum of lengths]."""
        if len(self._control_ranges) > _MANY_RANGES:
            return np.isin(encoded.ids, self._control, kind="table")
        found = np.zeros(len(encoded.ids), dtype=np.bool_)
        for first, count in self._control_ranges:
            # Of unsigned integers, those below `first` become very large: one comparison is enough.
            found |= encoded.ids - np.uint32(first) < count
        return found

    def _count_unknown(self, encoded: Encoded) -> int:
        """How many of the encoded ids are the unknown token."""
        if self._unknown is None:
            return 0
        return int(np.count_nonzero(encoded.ids == self._unknown))

    def _as_ordinary_text(
        self, texts: Sequence[str], encoded: Encoded, again: Sequence[int]
    ) -> Encoded:
        """The same ids, with those of the texts `again` as ordinary text."""
        with self._special_tokens_as_text():
            plain = self._tokenizer.reference.encode([texts[number] for number in again])
        parts = split_ids(encoded)
        for number, ids in zip(again, split_ids(plain), strict=True):
            parts[number] = ids
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return Encoded(np.concatenate(parts), lengths)

    @cached_property
    def _can_be_text(self) -> bool:
        """Whether no spelling of a special token becomes that token.

        Unigram's tokens may hold them.
        """
        if not self._control:
            return True
        spellings = [self._special[number] for number in self._control]
        with self._special_tokens_as_text():
            encoded = self._tokenizer.reference.encode(spellings)
        self._check_ids(encoded)
        return not self._is_control(encoded).any()

    @contextmanager
    def _special_tokens_as_text(self) -> Iterator[None]:
        # A switch of the whole tokenizer, which other callers share: for the block alone.
        # A setting of `tokenizers` that is not in the file: it cuts the spelling of a special token
        # like any other text.
        self._library.encode_special_tokens = True
        try:
            yield
        finally:
            self._library.encode_special_tokens = False

    # --- What cannot be spelled ---

    @cached_property
    def _described(self) -> dict[str, Any]:
        """The content of the tokenizer's file."""
        return read_object(self._tokenizer.path, DataError)

    def _unknown_id(self) -> int | None:
        model = self._described.get("model", {})
        if isinstance(model.get("unk_id"), int):  # Unigram
            return int(model["unk_id"])
        token = model.get("unk_token")
        return self._library.token_to_id(token) if isinstance(token, str) else None

    @cached_property
    def _may_lose(self) -> bool:
        """Whether a character without a token vanishes.

        It does with BPE that has no unknown token, and not all bytes.
        """
        model = self._described.get("model", {})
        if model.get("type", "BPE") != "BPE" or self._unknown is not None:
            return False
        # Their types, wherever they are in sequences of parts.
        around = str([self._described.get("pre_tokenizer"), self._described.get("normalizer")])
        ways = byte_tokens(
            is_byte_level="'ByteLevel'" in around, has_fallback=bool(model.get("byte_fallback"))
        )
        vocabulary = model.get("vocab", {})
        return not any(vocabulary.keys() >= set(tokens) for tokens in ways)

    def _lost(self, texts: Sequence[str]) -> int:
        """How many characters of `texts` the tokenizer drops."""
        if not self._may_lose:
            return 0
        lost = 0
        for character, count in Counter("".join(texts)).items():
            if self._is_lost(character):
                lost += count
        return lost

    def _is_lost(self, character: str) -> bool:
        """Whether the tokenizer drops a character.

        White space, and what its normalizer removes, is not lost.
        """
        if character not in self._lost_characters:
            normalizer = self._library.normalizer
            left = character
            if normalizer is not None:
                left = str(normalizer.normalize_str(character))
            is_text = bool(left.strip("▁ ")) and not character.isspace()
            encoded = self._tokenizer.reference.encode([_BEFORE, _BEFORE + character])
            before, with_character = split_ids(encoded)
            self._lost_characters[character] = is_text and np.array_equal(before, with_character)
        return self._lost_characters[character]


def split_ids(encoded: Encoded) -> list[npt.NDArray[np.uint32]]:
    """The ids of each text."""
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


def _ranges_of(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ids as ranges: the first id of each, and how many follow each other there."""
    ranges: list[tuple[int, int]] = []
    for number in ids:
        if ranges and number == sum(ranges[-1]):
            first, count = ranges[-1]
            ranges[-1] = (first, count + 1)
        else:
            ranges.append((number, 1))
    return ranges


@lru_cache(maxsize=4)
def cached_speller(
    tokenizer: Tokenizer, encoder: Encoder, special_tokens: SpecialTokens | None
) -> Speller:
    """The speller of a job, made once. Arguments and errors are those of `TokenizerJsonSpeller`."""
    if isinstance(tokenizer.reference, SentencePieceEncoder):
        return SentencePieceSpeller(tokenizer, tokenizer.reference, special_tokens)
    return TokenizerJsonSpeller(tokenizer, encoder, special_tokens)


def ids_of(tokenizer: Tokenizer, text: str, *, control: bool = False) -> list[int]:
    """The ids of one text by the reference, as tokenization makes them.

    `control`: special tokens in the text are these tokens, as in a chat.
    """
    # SentencePiece reads no special token in a text in any case.
    as_control = control and isinstance(tokenizer.reference, HuggingFaceEncoder)
    speller = cached_speller(tokenizer, tokenizer.reference, "control" if as_control else None)
    ids: list[int] = speller.spell([text]).encoded.ids.tolist()
    return ids
