"""The work on a range of a file: read, check, encode, write a shard. Tokens of Megatron-LM are only framed anew."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.data import Corpus
from pipeline.data.bad_records import Quarantine
from pipeline.data.chats import chat_template
from pipeline.data.jobs import STATE, UnitPart, UnitRecord, heldout_of
from pipeline.data.records import Document, DocumentUnit, Keys, Rejected
from pipeline.data.token_shards import Shard, ShardWriter, token_dtype, writing_shard
from pipeline.data.tokenizer import Encoded, Tokenizer, agree, load_tokenizer
from pipeline.data.units import Unit, unit_records
from pipeline.errors import DataError

_BATCH_BYTES = 2 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048


@dataclass(frozen=True)
class Job:
    """Everything that decides what a token corpus holds. Workers and the distribution of work are not part of it.

    `unit_bytes` is the size of a unit of work; None derives it from the size of the input. With `reference_only` the
    fast encoder is not used.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    output: Path
    part: str = "train"
    text_key: str = "text"
    prompt_key: str | None = None
    heldout_fraction: float = 0.0
    end_of_document: str | None = None
    unit_bytes: int | None = None
    document: DocumentUnit = "line"
    messages_key: str | None = None
    encoding: str | None = None
    reference_only: bool = False

    @property
    def keys(self) -> Keys:
        """Where documents are in the inputs."""
        return keys_of(self, Path(self.tokenizer))

    def quarantine_of(self, unit: str) -> Path:
        """The rejected records of a unit, if there are any."""
        return self.output / STATE / f"{unit}.quarantine.jsonl"


def keys_of(described: Job | Corpus, tokenizer: Path) -> Keys:
    """Where documents are in the inputs of a corpus.

    Raises:
        DataError: they are chats, and the tokenizer has no chat template.
    """
    if described.messages_key is not None:
        text = prompt = described.messages_key
        return Keys(text, prompt, described.document, chat_template(tokenizer), described.encoding)
    return Keys(described.text_key, described.prompt_key, described.document, encoding=described.encoding)


def is_heldout(text: str, fraction: float) -> bool:
    """Whether a document is held out: by a hash of its text (prompt included), so that copies stay together."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def tokenize_unit(job: Job, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards.

    Raises:
        DataError: there is an id outside the tokenizer's vocabulary, the encoders differ, or the file cannot be read.
    """
    tokenizer = cached_tokenizer(job.tokenizer, job.end_of_document)
    with ExitStack() as files:
        quarantine = files.enter_context(Quarantine(job.quarantine_of(unit.name), unit.path))

        def part(folder: Path) -> _Part:
            dtype, scratch = token_dtype(tokenizer.vocab_size), job.output / STATE
            return _Part(files.enter_context(writing_shard(folder / unit.name, dtype, scratch)), tokenizer, job)

        train = part(job.output)
        heldout = part(heldout_of(job.output)) if job.heldout_fraction > 0 else None
        records = _imported(unit, tokenizer) if unit.kind == "tokens" else unit_records(unit, job.keys)
        for record in records:
            if isinstance(record, Rejected):
                quarantine.add(record)
            elif heldout is not None and is_heldout(record.held_out_by, job.heldout_fraction):
                heldout.add(record)
            else:
                train.add(record)
        for each in filter(None, (train, heldout)):
            each.write_batch()
    return UnitRecord(
        train=train.outcome,
        heldout=heldout.outcome if heldout is not None else UnitPart(),
        rejected=dict(sorted(quarantine.counts.items())),
    )


@lru_cache(maxsize=1)
def cached_tokenizer(path: str, end_of_document: str | None) -> Tokenizer:
    """The tokenizer of a job, read once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use every core
    return load_tokenizer(Path(path), end_of_document=end_of_document)


def _imported(unit: Unit, tokenizer: Tokenizer) -> Iterator[Document | Rejected]:
    """The documents of tokens that Megatron-LM made, without what this tokenizer puts before and after a document."""
    shard = Shard(Path(unit.path).with_suffix(""))
    start, end = list(tokenizer.document_start), list(tokenizer.document_end)
    for number in range(unit.start, unit.stop):
        ids = shard.document(number).tolist()
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise DataError(
                f"{shard.bin_path}: document {number}: expected ids from 0 to {tokenizer.vocab_size - 1} of "
                f"{tokenizer.path}, found {min(ids)} to {max(ids)}; name the tokenizer that made it"
            )
        ids = ids[len(start) :] if ids[: len(start)] == start else ids
        ids = ids[: -len(end)] if ids[-len(end) :] == end else ids
        text = tokenizer.decode(ids)
        yield (
            Document(text, len(text.encode(errors="replace")), ids=ids) if ids else Rejected(number, "empty_text", b"")
        )


class _Part:
    """Collects the documents of one part of a unit, encodes them in batches and writes them.

    Either all documents have a prompt or none. Prompt and text are encoded separately, so that the tokens of a prompt
    do not depend on the text after it.
    """

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, job: Job) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._job = job
        self._counts = UnitPart()
        self._batch: list[Document] = []
        self._batch_bytes = 0

    def add(self, document: Document) -> None:
        self._batch.append(document)
        self._batch_bytes += document.utf8_bytes + document.prompt_utf8_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self.write_batch()

    @property
    def outcome(self) -> UnitPart:
        """The counts of everything written, and what the files hold, once they are published."""
        return self._counts.model_copy(update={"files": self._writer.files})

    def write_batch(self) -> None:
        """Encodes and writes the documents collected since the last batch."""
        batch, counts, tokenizer = self._batch, self._counts, self._tokenizer
        if not batch:
            return
        if batch[0].ids is not None:
            lists = [document.ids or [] for document in batch]
            ids, lengths = np.concatenate(lists), np.array([len(own) for own in lists])
        else:
            ids, lengths = self._encoded()
        prompt_lengths = None
        if batch[0].prompt is not None:
            prompts, answers = lengths.reshape(-1, 2).T
            lengths = prompts + answers
            prompt_lengths = len(tokenizer.document_start) + prompts
            counts.prompt_tokens += int(prompt_lengths.sum())
            counts.prompt_bytes += sum(document.prompt_utf8_bytes for document in batch)
        framed, framed_lengths = _frame(ids, lengths, tokenizer.document_start, tokenizer.document_end)
        self._writer.add(framed, framed_lengths, prompt_lengths)
        counts.documents += len(batch)
        counts.tokens += len(framed)
        counts.characters += sum(len(document.whole_text) for document in batch)
        counts.bytes += self._batch_bytes
        self._batch, self._batch_bytes = [], 0

    def _encoded(self) -> Encoded:
        """The ids of the batch's texts, of a document with a prompt two."""
        tokenizer, reference = self._tokenizer, self._tokenizer.reference
        texts = [text for document in self._batch for text in (document.prompt, document.text) if text is not None]
        encoder = reference if self._job.reference_only or tokenizer.fast is None else tokenizer.fast
        checked = texts[self._writer.documents % len(texts)][:_CHECKED_CHARACTERS]
        if encoder is not reference and not agree(encoder, reference, [checked]):
            raise DataError(
                f"{encoder.name} and {reference.name} differ on {checked[:60]!r}; remove {self._job.output} and start "
                "again with --reference-only"
            )
        encoded = encoder.encode(texts)
        if len(encoded.ids) and int(encoded.ids.max()) >= tokenizer.vocab_size:
            raise DataError(
                f"{tokenizer.path}: produced the id {encoded.ids.max()}, but has a vocabulary of {tokenizer.vocab_size}"
            )
        return encoded


def _frame(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Puts `start` and `end` around each of the joined documents `ids: [T]`, of `lengths: [documents]`."""
    framed_lengths = lengths + len(start) + len(end)
    stops = np.cumsum(framed_lengths)
    starts = stops - framed_lengths
    framed = np.empty(int(stops[-1]), dtype=ids.dtype)
    is_body = np.ones(len(framed), dtype=bool)
    frame = [(starts + at, token) for at, token in enumerate(start)]
    frame += [(stops - len(end) + at, token) for at, token in enumerate(end)]
    for places, token in frame:
        framed[places] = token
        is_body[places] = False
    framed[is_body] = ids
    return framed, framed_lengths
