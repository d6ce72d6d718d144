"""The libraries that turn texts into ids: two references, and `gigatoken`, trusted only while it agrees with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import gigatoken
import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers

from pipeline import log

# What the fast path must get right before it is tried on a corpus: scripts, spaces, digits, emoji, controls.
_PROBE = (
    "The quick brown fox can't jump over 12,345 lazy dogs.",
    "  leading spaces,\ttabs,\r\nline ends\n\n\n and trailing ones  ",
    "한국어 문장입니다. 정말 재미있어요ㅋㅋㅋ!! 2024년 3월",
    "日本語と中文、Русский, العربية, हिन्दी, e\u0301 café",
    "👩‍👩‍👧 \u200b\ufeff def f(x):\n        return x**2",
    "<s> </s> <unk> <|endoftext|>",
)
_logger = log.get_logger(__name__)


class Encoded(NamedTuple):
    """The ids of several texts, joined: `ids: uint32 [sum of lengths]`, `lengths: int64 [texts]`."""

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]


class Encoder(Protocol):
    """Anything that turns texts into ids without adding special tokens to them."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, joined."""
        ...


class HuggingFaceEncoder:
    """The reference for a `tokenizer.json`: the `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    def encode(self, texts: Sequence[str]) -> Encoded:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([encoding.ids for encoding in encodings])


class SentencePieceEncoder:
    """The reference for a `.model` file: the `sentencepiece` library."""

    name = "sentencepiece"

    def __init__(self, library: sentencepiece.SentencePieceProcessor) -> None:
        self._library = library

    def encode(self, texts: Sequence[str]) -> Encoded:
        return _joined(self._library.encode(list(texts), out_type=int, num_threads=1))

    def special_spellings(self) -> re.Pattern[str]:
        """Matches the spelling of every piece that stands for no text, or for itself."""
        library = self._library
        special = [i for i in range(library.get_piece_size()) if library.is_control(i) or library.is_unknown(i)]
        return re.compile("|".join(re.escape(library.id_to_piece(i)) for i in special))


class GigatokenEncoder:
    """The fast path.

    It remembers every word it meets, so it is made anew after so much text: memory must not follow the corpus.

    Where a text spells a special token (`</s>`), `sentencepiece` sees text and gigatoken the token:
    a batch with such a spelling in it goes to the reference.
    """

    name = "gigatoken"
    characters_between_renewals = 256 * 2**20

    def __init__(self, content: bytes, reference: HuggingFaceEncoder | SentencePieceEncoder) -> None:
        of_sentencepiece = isinstance(reference, SentencePieceEncoder)
        self._make = gigatoken.Tokenizer.from_sentencepiece if of_sentencepiece else gigatoken.Tokenizer.from_json
        self._left_to_reference = reference.special_spellings() if isinstance(reference, SentencePieceEncoder) else None
        self._reference = reference
        self._content = content
        self._library = self._make(content)
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        if self._left_to_reference and any(map(self._left_to_reference.search, texts)):
            return self._reference.encode(texts)
        characters = sum(map(len, texts))
        if self._characters + characters > self.characters_between_renewals:
            self._library = self._make(self._content)
            self._characters = 0
        self._characters += characters
        layout: Any = self._library.encode_batch(list(texts), parallel=False).layout
        return Encoded(np.asarray(layout.content.data), np.diff(np.asarray(layout.offsets.data)))


def fast_encoder(content: bytes, reference: HuggingFaceEncoder | SentencePieceEncoder) -> Encoder | None:
    """The fast path for the tokenizer file `content`, or None where it is unsupported or differs on a probe text."""
    try:
        encoder = GigatokenEncoder(content, reference)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        _logger.info("gigatoken does not support this tokenizer (%s): %s encodes", _first_line(error), reference.name)
        return None
    if not all(agree(encoder, reference, [text]) for text in _PROBE):
        _logger.warning("gigatoken differs from %s on the probe text: %s encodes", reference.name, reference.name)
        return None
    return encoder


def agree(one: Encoder, other: Encoder, texts: Sequence[str]) -> bool:
    """Whether two encoders give the same ids for each of `texts`."""
    mine, theirs = one.encode(texts), other.encode(texts)
    return np.array_equal(mine.lengths, theirs.lengths) and np.array_equal(mine.ids, theirs.ids)


def _joined(ids: Sequence[Sequence[int]]) -> Encoded:
    lengths = np.fromiter((len(one) for one in ids), dtype=np.int64, count=len(ids))
    flat = np.empty(int(lengths.sum()), dtype=np.uint32)
    at = 0
    for one in ids:
        flat[at : at + len(one)] = one
        at += len(one)
    return Encoded(flat, lengths)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
