"""The libraries that turn texts into ids, behind one interface.

The library `tokenizers` defines the ids of a `tokenizer.json`, `sentencepiece` those of its own
models. The fast encoder, `gigatoken`, is used only while it agrees with the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from typing import Any, NamedTuple, Union

import gigatoken
import numpy as np
import numpy.typing as npt
import tokenizers

from pipeline import log
from pipeline.data.tokenizer.sentencepiece_model import SentencePieceModel
from pipeline.errors import DataError, faults_of_library

# What the fast encoder must get right before it is used: scripts, spaces, digits, emoji, controls.
_TEST_TEXTS = (
    "The quick brown fox can't jump over 12,345 lazy dogs.",
    "  leading spaces,\ttabs,\r\nline ends\n\n\n and trailing ones  ",
    "한국어 문장입니다. 정말 재미있어요ㅋㅋㅋ!! 2024년 3월",
    "日本語と中文、Русский, العربية, हिन्दी, e\u0301 café",
    "👩‍👩‍👧 \u200b\ufeff def f(x):\n        return x**2",
    "<s> </s> <unk> <|endoftext|>",
)
_logger = log.get_logger(__name__)


class Encoded(NamedTuple):
    """The ids of several texts, joined.

    `ids`: uint32 [sum of lengths]; `lengths`: int64 [texts].
    """

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class HuggingFaceEncoder:
    """The reference: the `tokenizers` library."""

    library: tokenizers.Tokenizer
    name = "tokenizers"

    def encode(self, texts: Sequence[str]) -> Encoded:
        with faults_of_library("the tokenizer cannot encode a text", DataError):
            encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return joined([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.library.decode(list(ids), skip_special_tokens=False))

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of special tokens, and of others that are no part of the model's vocabulary."""
        return frozenset(self.library.get_added_tokens_decoder())


@dataclass(frozen=True)
class SentencePieceEncoder:
    """The reference of SentencePiece's own models: the library `sentencepiece`.

    Where a text spells a control piece such as `<s>`, it is cut as any other text.
    """

    model: SentencePieceModel
    name = "sentencepiece"

    def encode(self, texts: Sequence[str]) -> Encoded:
        with faults_of_library("the tokenizer cannot encode a text", DataError):
            ids: list[list[int]] = self.model.processor.encode(list(texts))
        return joined(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, with the control tokens' spellings, which the library leaves out."""
        processor = self.model.processor
        parts: list[str] = []
        with faults_of_library("the tokenizer cannot decode ids", DataError):
            for is_control, run in groupby(map(int, ids), processor.is_control):
                numbers = list(run)
                if is_control:
                    parts += processor.id_to_piece(numbers)
                else:
                    parts.append(processor.decode(numbers))
        return "".join(parts)

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of control pieces and of the unknown one."""
        processor = self.model.processor
        added: set[int] = set()
        for number in range(processor.get_piece_size()):
            if processor.is_control(number) or processor.is_unknown(number):
                added.add(number)
        return frozenset(added)


class GigatokenEncoder:
    """The fast encoder of a `tokenizer.json`.

    It caches every word it meets, so it is created anew after a fixed amount of text to bound its
    memory.
    """

    name = "gigatoken"
    characters_between_renewals = 256 * 2**20

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._library = gigatoken.Tokenizer.from_json(content)
        self._characters = 0

    def encode(self, texts: Sequence[str], utf8: Sequence[bytes] | None = None) -> Encoded:
        """The ids of `texts`; `utf8`: the same texts in UTF-8, which saves encoding them again."""
        characters = sum(map(len, texts))
        # A new encoder begins with an empty cache.
        if self._characters + characters > self.characters_between_renewals:
            self._library = gigatoken.Tokenizer.from_json(self._content)
            self._characters = 0
        self._characters += characters
        # Workers are processes, one for each core: threads would compete with them.
        inputs = list(texts if utf8 is None else utf8)
        layout: Any = self._library.encode_batch(inputs, parallel=False).layout
        return Encoded(np.asarray(layout.content.data), np.diff(np.asarray(layout.offsets.data)))


Reference = Union[HuggingFaceEncoder, SentencePieceEncoder]
Encoder = Union[Reference, GigatokenEncoder]


def agree(first: Encoder, second: Encoder, texts: Sequence[str]) -> bool:
    """Whether two encoders produce the same ids for each of `texts`."""
    ours = first.encode(texts)
    theirs = second.encode(texts)
    return np.array_equal(ours.lengths, theirs.lengths) and np.array_equal(ours.ids, theirs.ids)


def joined(ids: Sequence[Sequence[int]]) -> Encoded:
    """The ids of several texts, one text behind the other."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    in_a_row = chain.from_iterable(ids)
    return Encoded(np.fromiter(in_a_row, dtype=np.uint32, count=int(lengths.sum())), lengths)


def fast_encoder(content: bytes, reference: HuggingFaceEncoder) -> GigatokenEncoder | None:
    """The fast encoder for the tokenizer.json `content`.

    None if it is unsupported or fails on a test text.
    """
    try:
        with faults_of_library("unsupported", DataError):
            encoder = GigatokenEncoder(content)
            differing = _first_difference(encoder, reference)
    except DataError:
        # The library's own words name a place in its source.
        reason = "gigatoken, the fast encoder, does not support this tokenizer"
    else:
        if differing is None:
            return encoder
        reason = f"gigatoken, the fast encoder, has other ids on {differing!r}"
    _say_once(f"{reason}: {reference.name} encodes, which is slower")
    return None


def _first_difference(encoder: GigatokenEncoder, reference: HuggingFaceEncoder) -> str | None:
    """The first test text that the fast encoder does not encode as the reference; None for none."""
    texts = [*_TEST_TEXTS, *_texts_with_added_tokens(reference)]
    if agree(encoder, reference, texts):
        return None
    for text in texts:
        if not agree(encoder, reference, [text]):
            return text
    # Alone each is encoded alike: the fast encoder depends on the texts before.
    return "several texts"


def _texts_with_added_tokens(reference: HuggingFaceEncoder) -> list[str]:
    """Texts that spell each added token alone, within a word, between spaces, and in other cases.

    An added token may match whole words only, take the spaces around it, or match before or behind
    the normalizer (`single_word`, `lstrip`, `rstrip`, `normalized`).
    """
    texts: list[str] = []
    for token in reference.library.get_added_tokens_decoder().values():
        spelled = str(token.content)
        texts += [
            spelled,
            f"x{spelled}x {spelled}. ({spelled}){spelled}1_{spelled}",
            f"가{spelled}는  {spelled}  \n{spelled}\té{spelled}é",
            f"{spelled.lower()} {spelled.upper()}",
        ]
    return texts


@cache
def _say_once(line: str) -> None:
    """Logs a line once in a process, however often a command reads its tokenizer."""
    _logger.info("%s", line)
