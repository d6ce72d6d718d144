"""Tokenizing a range of a file: read, check, encode, write a shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import log
from pipeline.config.data import Corpus
from pipeline.data.bad_records import Quarantine
from pipeline.data.chats import chat_template
from pipeline.data.jobs import STATE, PartCounts, UnitPart, UnitRecord, heldout_of
from pipeline.data.records import Document, DocumentUnit, Keys, Rejected
from pipeline.data.token_shards import ShardWriter, token_dtype, writing_shard
from pipeline.data.tokenizer import Encoder, Tokenizer, agree, load_tokenizer
from pipeline.data.units import Unit, unit_records
from pipeline.errors import DataError
from pipeline.files import write_json

_BATCH_BYTES = 2 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Job:
    """Everything that decides what a token corpus holds. Workers and the distribution of work are not part of it.

    `unit_bytes` is the size of a unit of work; None derives it from the size of the input.
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

    @property
    def keys(self) -> Keys:
        """Where documents are in the inputs."""
        return keys_of(self, Path(self.tokenizer))

    @property
    def heldout(self) -> Path:
        """The folder of the held-out part."""
        return heldout_of(self.output)

    @property
    def state(self) -> Path:
        """The folder of unfinished work; removed when the manifest is written."""
        return self.output / STATE

    @property
    def reference_only(self) -> Path:
        """Exists once the fast encoder has made an error: the reference library then encodes everything."""
        return self.state / "reference_only.json"

    def quarantine_of(self, unit: str) -> Path:
        """The rejected records of a unit, if there are any."""
        return self.state / f"{unit}.quarantine.jsonl"


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
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def tokenize_unit(job: Job, most_rejected: float, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards.

    Raises:
        DataError: the tokenizer produced an id outside its own vocabulary, the file cannot be read, or there are more
            than `most_rejected` bad records.
    """
    tokenizer = _cached_tokenizer(job.tokenizer, job.end_of_document)
    fast = None if job.reference_only.exists() else tokenizer.fast
    if fast is not None:
        try:
            return _tokenize_with(job, unit, tokenizer, fast, most_rejected)
        except _Disagreement as difference:
            _logger.warning("%s, unit %s: %s; the reference encodes the whole corpus", unit.path, unit.name, difference)
            write_json(job.reference_only, {"path": unit.path, "unit": unit.name, "reason": str(difference)})
    return _tokenize_with(job, unit, tokenizer, tokenizer.reference, most_rejected)


@lru_cache(maxsize=1)
def _cached_tokenizer(path: str, end_of_document: str | None) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use every core
    return load_tokenizer(Path(path), end_of_document=end_of_document)


class _Disagreement(Exception):  # noqa: N818  # not an error: the reference takes over
    """The fast encoder and the reference produced different ids."""


def _tokenize_with(job: Job, unit: Unit, tokenizer: Tokenizer, encoder: Encoder, most_rejected: float) -> UnitRecord:
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as files:
        quarantine = files.enter_context(Quarantine(job.quarantine_of(unit.name), unit.path, most_rejected))

        def part(folder: Path) -> _Part:
            return _Part(files.enter_context(writing_shard(folder / unit.name, dtype, job.state)), tokenizer, encoder)

        train = part(job.output)
        heldout = part(job.heldout) if job.heldout_fraction > 0 else None
        for record in unit_records(unit, job.keys):
            if isinstance(record, Rejected):
                quarantine.add(record)
            elif heldout is not None and is_heldout(record.held_out_by, job.heldout_fraction):
                heldout.add(record)
            else:
                train.add(record)
        for each in filter(None, (train, heldout)):
            each.finish()
    return UnitRecord(
        backend=encoder.name,
        train=train.outcome,
        heldout=heldout.outcome if heldout is not None else UnitPart(),
        rejected=dict(sorted(quarantine.counts.items())),
    )


class _Part:
    """Collects the documents of one part of a unit, encodes them in batches and writes them.

    Either all documents have a prompt or none. Prompt and text are encoded separately, so that the tokens of a prompt
    do not depend on the text after it.
    """

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, encoder: Encoder) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._counts = PartCounts()
        self._texts: list[str] = []  # two for a document with a prompt
        self._batch_bytes = 0

    def add(self, document: Document) -> None:
        self._texts += [document.text] if document.prompt is None else [document.prompt, document.text]
        self._counts.documents += 1
        self._counts.characters += len(document.whole_text)
        self._counts.prompt_bytes += document.prompt_utf8_bytes
        self._batch_bytes += document.utf8_bytes + document.prompt_utf8_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._encode_batch()

    def finish(self) -> None:
        """Writes the last batch."""
        if self._texts:
            self._encode_batch()

    @property
    def outcome(self) -> UnitPart:
        """The counts of everything written, and what the files hold, once they are published."""
        return UnitPart(**self._counts.model_dump(), files=self._writer.files)

    def _encode_batch(self) -> None:
        tokenizer = self._tokenizer
        checked = [self._texts[self._writer.documents % len(self._texts)][:_CHECKED_CHARACTERS]]
        if self._encoder is not tokenizer.reference and not agree(self._encoder, tokenizer.reference, checked):
            raise _Disagreement(f"{self._encoder.name} and {tokenizer.reference.name} differ on {checked[0][:60]!r}")
        ids, lengths = self._encoder.encode(self._texts)
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            raise DataError(
                f"{tokenizer.path}: produced the id {ids.max()}, but has a vocabulary of {tokenizer.vocab_size}"
            )
        prompt_lengths = None
        if self._counts.prompt_bytes:  # no prompt is empty
            prompts, answers = lengths.reshape(-1, 2).T
            lengths = prompts + answers
            prompt_lengths = len(tokenizer.document_start) + prompts
            self._counts.prompt_tokens += int(prompt_lengths.sum())
        framed, framed_lengths = _frame(ids, lengths, tokenizer.document_start, tokenizer.document_end)
        self._writer.add(framed, framed_lengths, prompt_lengths)
        self._counts.tokens += len(framed)
        self._counts.bytes += self._batch_bytes
        self._texts, self._batch_bytes = [], 0


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
