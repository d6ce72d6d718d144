"""Loads tokenizers: a `tokenizer.json`, a model of SentencePiece, or a folder with either.

A document becomes `document_start + ids + document_end`: what the tokenizer's own post-processor
puts before a text (a BOS, or nothing), and an end-of-document token. Every corpus manifest records
both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import orjson
import tokenizers

from pipeline import log
from pipeline.data.corpus.manifest import TokenizerRecord
from pipeline.data.tokenizer.document_end import document_end, json_beside, spelling_of
from pipeline.data.tokenizer.encoders import (
    GigatokenEncoder,
    HuggingFaceEncoder,
    Reference,
    SentencePieceEncoder,
    fast_encoder,
)
from pipeline.data.tokenizer.sentencepiece_model import SUFFIX, SentencePieceModel, read_model
from pipeline.data.tokenizer.tokenizer_file import fingerprint_of, tokenizer_file, without_dropout
from pipeline.errors import DataError, faults_of_library
from pipeline.files.json_files import read_object
from pipeline.files.reading import read_bytes

# Classes of transformers that put nothing before a text, although their models may have a BOS.
_CLASSES_WITHOUT_START = ("T5Tokenizer", "GPTSw3Tokenizer")
# Texts that are encoded at a time.
_BATCH = 256
_logger = log.get_logger(__name__)


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

    def without_frame(self, document: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The ids of a document of a corpus, without those that stand before and after it.

        A chat may begin without the tokenizer's start.
        """
        first = len(self.document_start)
        if tuple(document[:first].tolist()) != self.document_start:
            first = 0
        return document[first : len(document) - len(self.document_end)]

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
        document_end=document_end(file, library.token_to_id, vocab_size, end_of_document, own_end),
        reference=reference,
        fast=fast_encoder(content, reference),
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
        document_end=document_end(model.path, model.id_of, vocab_size, end_of_document, own_end),
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
