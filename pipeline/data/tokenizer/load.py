"""Loads tokenizers: a `tokenizer.json`, a model of SentencePiece, or a folder with either.

A document becomes `document_start + ids + document_end`: what the tokenizer's own post-processor
puts before a text (a BOS, or nothing), and an end-of-document token. Every corpus manifest records
both.

The library `tokenizers` defines the ids of a `tokenizer.json`, `sentencepiece` those of its own
models. The fast encoder, `gigatoken`, is used only while it agrees with the former.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Union

import gigatoken
import numpy as np
import numpy.typing as npt
import orjson
import tokenizers

from pipeline import log
from pipeline.data.corpus.manifest import TokenizerRecord
from pipeline.data.tokenizer.sentencepiece_model import (
    MODEL_FILES,
    SUFFIX,
    SentencePieceModel,
    read_model,
)
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_bytes, read_object

# For a tokenizer.json alone, which does not say which of its special tokens ends a text.
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
# What the fast encoder must get right before it is used: scripts, spaces, digits, emoji, controls.
_TEST_TEXTS = (
    "The quick brown fox can't jump over 12,345 lazy dogs.",
    "  leading spaces,\ttabs,\r\nline ends\n\n\n and trailing ones  ",
    "한국어 문장입니다. 정말 재미있어요ㅋㅋㅋ!! 2024년 3월",
    "日本語と中文、Русский, العربية, हिन्दी, e\u0301 café",
    "👩‍👩‍👧 \u200b\ufeff def f(x):\n        return x**2",
    "<s> </s> <unk> <|endoftext|>",
)
_EXPECTED = (
    "expected a tokenizer.json, a model of SentencePiece (.model), or the Hugging Face folder that "
    "has one of them; transformers writes one of other files: "
    "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
)
# Classes of transformers that put nothing before a text, although their models may have a BOS.
_CLASSES_WITHOUT_START = ("T5Tokenizer", "GPTSw3Tokenizer")
# Texts that are encoded at a time.
_BATCH = 256
# Entries of a tokenizer.json that do not decide the ids.
_UNDECISIVE = ("version", "truncation", "padding")
TOKENIZER_FILE = "tokenizer.json"
# The first of them that a folder has is read.
_FILES = (TOKENIZER_FILE, *MODEL_FILES)
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


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer."""

    path: Path
    """The file that the tokenizer was read from."""
    fingerprint: str
    """A hash that is equal for tokenizers that produce equal ids, also in different folders."""
    vocab_size: int
    """The largest id plus one."""
    document_start: tuple[int, ...]
    """The ids before every document, often none."""
    document_end: tuple[int, ...]
    """The ids after every document, at least one."""
    reference: Reference
    fast: GigatokenEncoder | None
    """The fast encoder.

    None if gigatoken does not support this tokenizer, or SentencePiece is the reference.
    """

    @property
    def before_document(self) -> tuple[int, ...]:
        """The ids that a model reads before a document: its start, or the end of another."""
        return self.document_start or self.document_end[-1:]

    def record(self, backend: str) -> TokenizerRecord:
        """What the manifest of a corpus says of it; `backend` made the ids."""
        return TokenizerRecord(
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            document_start=list(self.document_start),
            document_end=list(self.document_end),
            backend=backend,
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of `ids`, including special tokens if the library shows them."""
        return self.reference.decode([int(token) for token in ids])


def load_tokenizer(path: Path, *, end_of_document: str | None = None) -> Tokenizer:
    """Loads a tokenizer from a Hugging Face folder, a `tokenizer.json`, or a SentencePiece model.

    BPE dropout is switched off, and a line says so.

    Args:
        path: the folder or file.
        end_of_document: the token that ends a document, if the tokenizer's own files do not say or
            are wrong.

    Raises:
        DataError: there is no tokenizer, it is damaged, or it has no token to end a document with.
    """
    file = tokenizer_file(path)
    content = read_bytes(file, DataError)
    if file.suffix == SUFFIX:
        return _sentencepiece_tokenizer(read_model(file, content), end_of_document)
    described = read_object(file, DataError)
    undropped = without_dropout(described)
    if undropped is not None:
        message = (
            "%s: its BPE dropout of %s, which makes other tokens of a text each time, is switched "
            "off"
        )
        _logger.warning(message, file, described["model"]["dropout"])
        described = undropped
        content = orjson.dumps(undropped)
    with faults_of_library(f"{file}: cannot read this tokenizer.json", DataError):
        library = tokenizers.Tokenizer.from_buffer(content)
        # A tokenizer.json may truncate to the model's context, or pad: either would change a corpus
        # silently.
        library.no_truncation()
        library.no_padding()
        # Not the number of tokens, of which some ids may be missing: rows of the embedding are
        # indexed by id.
        vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        fingerprint = fingerprint_of(described)
        start, own_end = _frame(file, library, vocab_size)
    reference = HuggingFaceEncoder(library)
    return Tokenizer(
        path=file,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        document_start=start,
        document_end=_document_end(file, library.token_to_id, vocab_size, end_of_document, own_end),
        reference=reference,
        fast=_fast_encoder(content, reference),
    )


def _frame(
    file: Path, library: tokenizers.Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's own post-processor puts before and after a text."""
    # What stands around the ids of a text is found around those of "a".
    bare: list[int] = library.encode("a", add_special_tokens=False).ids
    framed: list[int] = library.encode("a", add_special_tokens=True).ids
    if bare and max(framed, default=0) < vocab_size:
        for first in range(len(framed)):
            behind = first + len(bare)
            if framed[first:behind] == bare:
                return tuple(framed[:first]), tuple(framed[behind:])
    raise DataError(
        f"{file}: encodes 'a' as {bare[:20]}, with special tokens as {framed[:20]}; copy it again"
    )


def _sentencepiece_tokenizer(model: SentencePieceModel, end_of_document: str | None) -> Tokenizer:
    """The tokenizer of a model of SentencePiece.

    The model does not say what stands before and after a document.

    That is what the folder's tokenizer_config.json says, as the classes of transformers read it: a
    BOS before, unless it says otherwise. The end is the EOS.
    """
    described = json_beside(model.path, "tokenizer_config.json")
    adds_start = described.get("add_bos_token")
    if adds_start is None:
        adds_start = not str(described.get("tokenizer_class")).startswith(_CLASSES_WITHOUT_START)
    start: tuple[int, ...] = ()
    if adds_start:
        first = model.id_of(spelling_of(described.get("bos_token")) or "")
        if first is None:
            first = int(model.processor.bos_id())
        if first >= 0:
            # The library's id of a piece that a model does not have is -1.
            start = (first,)
    last = int(model.processor.eos_id())
    named_end = spelling_of(described.get("eos_token"))
    own_end: tuple[int, ...] = ()
    if named_end is None and last >= 0:
        own_end = (last,)
    vocab_size = int(model.processor.get_piece_size())
    described_frame = json.dumps([model.fingerprint, start]).encode()
    return Tokenizer(
        path=model.path,
        fingerprint="sentencepiece:" + hashlib.sha256(described_frame).hexdigest(),
        vocab_size=vocab_size,
        document_start=start,
        document_end=_document_end(model.path, model.id_of, vocab_size, end_of_document, own_end),
        reference=SentencePieceEncoder(model),
        fast=None,
    )


class Fertility(NamedTuple):
    """How many tokens a tokenizer makes of a text, without those around documents."""

    tokens: int
    tokens_per_character: float
    tokens_per_byte: float


def fertility(tokenizer: Tokenizer, documents: Iterable[str]) -> Fertility:
    """How many tokens a tokenizer makes of documents."""
    # The ids are the same.
    encoder = tokenizer.fast or tokenizer.reference
    characters = 0
    size = 0
    tokens = 0
    for batch in batches(documents):
        for text in batch:
            characters += len(text)
            size += len(text.encode())
        tokens += len(encoder.encode(batch).ids)
    return Fertility(tokens, tokens / max(characters, 1), tokens / max(size, 1))


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, so many at a time as are encoded together."""
    remaining = iter(texts)
    while True:
        batch = list(islice(remaining, _BATCH))
        if not batch:
            return
        yield batch


@lru_cache(maxsize=1)
def cached_tokenizer(path: Path, end_of_document: str | None) -> Tokenizer:
    """The tokenizer of a job, read once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use every core
    return load_tokenizer(path, end_of_document=end_of_document)


def tokenizer_file(path: Path) -> Path:
    """The file of the tokenizer at `path`.

    Raises:
        DataError: where there is none.
    """
    files = [path]
    if path.is_dir():
        files = [path / name for name in _FILES]
    for file in files:
        if file.is_file():
            return file
    raise DataError(f"{files[0]}: no such tokenizer; {_EXPECTED}")


def has_tokenizer_file(folder: Path) -> bool:
    """Whether the folder has a tokenizer that `load_tokenizer` reads, damaged or not."""
    return any((folder / name).is_file() for name in _FILES)


def json_file(path: Path) -> Path:
    """The tokenizer.json of the tokenizer at `path`.

    Raises:
        DataError: where there is none; the message says what to do.
    """
    file = tokenizer_file(path)
    if file.suffix == SUFFIX:
        written = file.with_name(TOKENIZER_FILE)
        raise DataError(
            f"{file}: a model of SentencePiece, expected a tokenizer.json; write it, and see how "
            f"its ids compare on your texts: scale-cpt tokenizer --convert {file} --output "
            f"{written} --report-on FILE…"
        )
    return file


def _fast_encoder(content: bytes, reference: HuggingFaceEncoder) -> GigatokenEncoder | None:
    """The fast encoder for the tokenizer.json `content`.

    None if it is unsupported or fails on a test text.
    """
    try:
        with faults_of_library("gigatoken does not support this tokenizer", DataError):
            encoder = GigatokenEncoder(content)
            if all(agree(encoder, reference, [text]) for text in _TEST_TEXTS):
                return encoder
    except DataError as error:
        _logger.info("%s: %s encodes", error, reference.name)
    else:
        _logger.warning(
            "gigatoken differs from %s on a test text: %s encodes", reference.name, reference.name
        )
    return None


def without_dropout(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """The contents of a tokenizer.json with BPE dropout switched off.

    None where there is none to switch off.

    Dropout, a means against overfitting, leaves out merges at random: the same text gets other
    tokens each time.
    """
    model = described.get("model")
    if not isinstance(model, dict) or not model.get("dropout"):
        return None
    return {**described, "model": {**model, "dropout": None}}


def fingerprint_of(described: dict[str, Any]) -> str:
    """A hash of what decides the ids.

    Truncation, padding, and which of two spellings merges have are left out.
    """
    canonical = dict(described)
    for key in _UNDECISIVE:
        canonical.pop(key, None)
    # Merges are pairs since version 0.20 of `tokenizers`, and were strings before.
    model = dict(canonical.get("model", {}))
    if "merges" in model:
        pairs: list[Any] = []
        for merge in model["merges"]:
            # A space cannot be in a token of a merge that is a string: byte-level BPE spells it Ġ,
            # others ▁.
            pairs.append(merge.split(" ") if isinstance(merge, str) else merge)
        model["merges"] = pairs
    canonical["model"] = model
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "tokenizers:" + hashlib.sha256(text.encode()).hexdigest()


def _document_end(
    file: Path,
    id_of: Callable[[str], int | None],
    vocab_size: int,
    wanted: str | None,
    own_end: tuple[int, ...],
) -> tuple[int, ...]:
    """The ids that end a document.

    They are what the user wants, the tokenizer's own, the folder's, or a well-known token.

    Raises:
        DataError: there is none, or the tokenizer does not have the one that is named.
    """
    if wanted is not None:
        found = id_of(wanted)
        if found is None:
            raise DataError(
                f"{file}: has no token {wanted!r} to end documents with; name one of its own"
            )
        return (found,)
    if own_end:
        return own_end
    named = spelling_of(json_beside(file, "tokenizer_config.json").get("eos_token"))
    if named is not None:
        found = id_of(named)
        if found is None:
            raise DataError(
                f"{file.with_name('tokenizer_config.json')}: eos_token: expected a token of the "
                f"tokenizer, found {named!r}, which it does not have; correct it, or name one with "
                "--end-of-document"
            )
        return (found,)
    # In this order, because transformers' `generate` stops at the former's.
    for name in ("generation_config.json", "config.json"):
        found = _end_in(file.with_name(name), vocab_size)
        if found is not None:
            return (found,)
    # A tokenizer.json alone, whose vocabulary is all that it says.
    for candidate in _KNOWN_ENDS:
        found = id_of(candidate)
        if found is not None:
            return (found,)
    raise DataError(
        f"{file}: does not say which token ends a document; name it with --end-of-document"
    )


def _end_in(file: Path, vocab_size: int) -> int | None:
    """The `eos_token_id` in a file beside the tokenizer, of several the first.

    None if it has none.

    Raises:
        DataError: it is beyond the vocabulary.
    """
    found = json_beside(file, file.name).get("eos_token_id")
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, int) or found < 0:
        return None
    if found >= vocab_size:
        raise DataError(
            f"{file}: eos_token_id: expected an id of the tokenizer, below {vocab_size}, found "
            f"{found}; correct it, or name the token with --end-of-document"
        )
    return found


def spelling_of(token: object) -> str | None:
    """The spelling of a special token in a tokenizer_config.json, which has text or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def json_beside(file: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of the tokenizer's folder; empty if there is none."""
    try:
        return read_object(file.with_name(name), DataError)
    except FileNotFoundError:
        return {}
