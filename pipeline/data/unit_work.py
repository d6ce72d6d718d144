"""What a worker does with one unit: read, check, tokenize, write; and the record of it that says the unit is done."""

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
from pydantic import BaseModel, ConfigDict

from pipeline import log
from pipeline.data.records import Document, Keys, Quarantine, Rejected
from pipeline.data.token_shards import ShardWriter, token_dtype, writing_prompt_lengths, writing_shard
from pipeline.data.tokenizer import Encoder, Tokenizer, agree, load_tokenizer
from pipeline.data.units import Unit, unit_records
from pipeline.errors import DataError
from pipeline.files import file_hash, write_json

_BATCH_BYTES = 2 * 2**20
# The fast path is checked on the beginning of one document a batch: often enough to notice, too little to slow it down.
_CHECKED_CHARACTERS = 2048
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Job:
    """Everything that decides what a token corpus holds. Who does the work, and how it is spread, is not in it.

    `unit_bytes` is the size of a unit of work; None lets the size of the input decide.
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

    @property
    def keys(self) -> Keys:
        """Where a record has its text, and its prompt."""
        return Keys(self.text_key, self.prompt_key)

    @property
    def heldout(self) -> Path:
        """The folder of the held-out part."""
        return self.output.with_name(self.output.name + ".heldout")

    @property
    def state(self) -> Path:
        """Where unfinished work lies, until the manifest is written."""
        return self.output / ".units"

    @property
    def reference_only(self) -> Path:
        """Exists once the fast path was caught in a difference: everything is then encoded by the reference."""
        return self.state / "reference_only.json"


class PartCounts(BaseModel):
    """What one unit gave to the train or to the held-out part."""

    model_config = ConfigDict(extra="forbid")

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    bytes: int = 0
    prompt_tokens: int = 0
    prompt_bytes: int = 0


class UnitRecord(BaseModel):
    """The outcome of a unit; its file is written after everything else of the unit, and makes the unit done."""

    model_config = ConfigDict(extra="forbid")

    backend: str
    train: PartCounts
    heldout: PartCounts
    rejected: dict[str, int]

    @property
    def records(self) -> int:
        """How many records were read, good and bad."""
        return self.train.documents + self.heldout.documents + sum(self.rejected.values())


def unit_record_path(job: Job, unit: Unit) -> Path:
    """The file that says that `unit` is done."""
    return job.state / f"{unit.name}.json"


def finished_record(job: Job, unit: Unit) -> UnitRecord | None:
    """The outcome of `unit`, if it is done and still stands."""
    try:
        record = UnitRecord.model_validate_json(unit_record_path(job, unit).read_bytes())
    except FileNotFoundError:
        return None
    return None if record.backend == "gigatoken" and job.reference_only.exists() else record


def hash_path(job: Job, file_index: int) -> Path:
    """The file that holds the hash of an input."""
    return job.state / f"{file_index:05d}.sha256.json"


def hash_input(job: Job, file_index: int, path: str) -> str:
    """The SHA-256 of an input file, computed once."""
    known = hash_path(job, file_index)
    if not known.exists():
        write_json(known, file_hash(Path(path)))
    return known.read_text().strip().strip('"')


def tokenize_unit(job: Job, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards, unless that has been done.

    Raises:
        DataError: the tokenizer gave an id outside its own vocabulary.
    """
    if (done := finished_record(job, unit)) is not None:
        return done
    tokenizer = _tokenizer(job.tokenizer, job.end_of_document)
    fast = None if job.reference_only.exists() else tokenizer.fast
    if fast is not None:
        try:
            return _tokenize_with(job, unit, tokenizer, fast)
        except _Disagreement as difference:
            _logger.warning(
                "%s, unit %s: %s; the whole corpus is now encoded by the reference", unit.path, unit.name, difference
            )
            write_json(job.reference_only, {"path": unit.path, "unit": unit.name, "reason": str(difference)})
    return _tokenize_with(job, unit, tokenizer, tokenizer.reference)


class _Disagreement(Exception):  # noqa: N818  # not an error: the reference takes over
    """The fast path gave other ids than the reference."""


def _tokenize_with(job: Job, unit: Unit, tokenizer: Tokenizer, encoder: Encoder) -> UnitRecord:
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as files:
        quarantine = files.enter_context(Quarantine(job.state / f"{unit.name}.quarantine.jsonl", unit.path))

        def part(folder: Path) -> _Part:
            writer = files.enter_context(writing_shard(folder / unit.name, dtype, job.state))
            if job.prompt_key is None:
                return _Part(writer, tokenizer, encoder)
            prompts = files.enter_context(writing_prompt_lengths(folder / unit.name, job.state))
            return _Part(writer, tokenizer, encoder, prompts)

        train = part(job.output)
        heldout = part(job.heldout) if job.heldout_fraction > 0 else train
        for record in unit_records(unit, job.keys):
            if isinstance(record, Rejected):
                quarantine.add(record)
            elif heldout is not train and is_heldout(record.whole_text, job.heldout_fraction):
                heldout.add(record)
            else:
                train.add(record)
        train.flush()
        heldout.flush()
    outcome = UnitRecord(
        backend=encoder.name,
        train=train.counts,
        heldout=heldout.counts if heldout is not train else PartCounts(),
        rejected=dict(sorted(quarantine.counts.items())),
    )
    write_json(unit_record_path(job, unit), outcome.model_dump())
    return outcome


def is_heldout(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: by a hash of its text, so that copies of it stay together.

    `text` begins with the prompt, where there is one.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class _Part:
    """Collects the documents of one part, and encodes them in batches.

    With `prompt_lengths`, to which it appends, every document has a prompt. Prompt and text are encoded apart, so that
    the tokens of a prompt are the same whatever follows.
    """

    def __init__(
        self,
        writer: ShardWriter,
        tokenizer: Tokenizer,
        encoder: Encoder,
        prompt_lengths: list[npt.NDArray[Any]] | None = None,
    ) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._prompt_lengths = prompt_lengths
        self._texts: list[str] = []  # of a document with a prompt two
        self._batch_bytes = self._bytes = self._characters = 0
        self._prompt_bytes = self._prompt_tokens = 0

    @property
    def counts(self) -> PartCounts:
        """What was written so far."""
        return PartCounts(
            documents=self._writer.documents,
            tokens=self._writer.tokens,
            characters=self._characters,
            bytes=self._bytes,
            prompt_tokens=self._prompt_tokens,
            prompt_bytes=self._prompt_bytes,
        )

    def add(self, document: Document) -> None:
        self._texts += [document.text] if document.prompt is None else [document.prompt, document.text]
        self._characters += len(document.whole_text)
        self._prompt_bytes += document.prompt_utf8_bytes
        self._batch_bytes += document.utf8_bytes + document.prompt_utf8_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._texts:
            return
        reference = self._tokenizer.reference
        checked = [self._texts[self._writer.documents % len(self._texts)][:_CHECKED_CHARACTERS]]
        if self._encoder is not reference and not agree(self._encoder, reference, checked):
            raise _Disagreement(f"{self._encoder.name} and {reference.name} differ on {checked[0][:60]!r}")
        ids, lengths = self._encoder.encode(self._texts)
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            raise DataError(
                f"{self._tokenizer.path}: gave the id {ids.max()}, but has a vocabulary of {self._tokenizer.vocab_size}"
            )
        start, end = self._tokenizer.document_start, self._tokenizer.document_end
        if self._prompt_lengths is not None:
            prompts, answers = lengths.reshape(-1, 2).T
            lengths = prompts + answers
            self._prompt_lengths.append(len(start) + prompts)
            self._prompt_tokens += int(self._prompt_lengths[-1].sum())
        framed, framed_lengths = frame_documents(ids, lengths, start, end)
        self._writer.add(framed, framed_lengths)
        self._bytes += self._batch_bytes
        self._texts, self._batch_bytes = [], 0


def frame_documents(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Puts `start` and `end` around every one of the joined documents `ids: [T]`, of `lengths: [documents]`."""
    framed_lengths = lengths + len(start) + len(end)
    stops = np.cumsum(framed_lengths)
    framed = np.empty(int(stops[-1]), dtype=ids.dtype)
    body = np.ones(len(framed), dtype=bool)
    for at, token in enumerate(start):
        framed[stops - framed_lengths + at] = token
        body[stops - framed_lengths + at] = False
    for at, token in enumerate(reversed(end), start=1):
        framed[stops - at] = token
        body[stops - at] = False
    framed[body] = ids
    return framed, framed_lengths


@lru_cache(maxsize=1)
def _tokenizer(path: str, end_of_document: str | None) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    return load_tokenizer(Path(path), end_of_document=end_of_document)
