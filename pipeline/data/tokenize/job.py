"""Documents to a token corpus: a job whose units are ranges of the input files.

A unit is read, checked, encoded and written as a shard. Tokens of Megatron-LM are not encoded
again: only the tokens around each document change. Rejected records are listed in a quarantine, and
too many of them stop the job.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import numpy as np
import numpy.typing as npt
import orjson

from pipeline import log
from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    Shard,
    ShardWriter,
    content_of,
    token_dtype,
    writing_shard,
)
from pipeline.data.corpus.manifest import Counts, InputFile, Manifest
from pipeline.data.sources.file_names import shown_size
from pipeline.data.sources.object_stores import RemoteFile, input_path
from pipeline.data.sources.records import Document, Keys, Record, Rejected, SpecialTokens
from pipeline.data.sources.streams import encoding_advice
from pipeline.data.tokenize.contamination import compare_documents
from pipeline.data.tokenize.corpora import Job, is_heldout
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.queue import (
    QUARANTINE,
    STATE,
    CorpusPlan,
    JobShare,
    UnitOutcome,
    UnitPart,
    UnitRecord,
    WorkUnit,
    complete,
    heldout_of,
    letters_of,
    manifest_of,
    publish,
    quarantine_of,
    run_units,
)
from pipeline.data.tokenize.text_hashes import hash_of_letters
from pipeline.data.tokenize.units import (
    Unit,
    default_unit_bytes,
    input_files,
    is_text,
    split_file,
    unit_records,
)
from pipeline.data.tokenize.workers import Workers
from pipeline.data.tokenizer.load import (
    Encoded,
    Encoder,
    Tokenizer,
    agree,
    cached_tokenizer,
    joined,
    load_tokenizer,
)
from pipeline.data.tokenizer.spelling import cached_speller
from pipeline.errors import TRANSIENT_FAULT, DataError, in_one_line, is_full_disk
from pipeline.files import file_hash, held_bytes, published_file, sampled_hash

# With batches of a megabyte the fast encoder is a tenth slower; with larger ones it is no faster.
_BATCH_BYTES = 4 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048
# Of a larger file only blocks are hashed. Each job hashes its inputs before it tokenizes, and would
# read a file of a terabyte twice.
_HASHED_BYTES = 2**34
_SAMPLED_BLOCKS = 2**14
# Per unit. A bad record may be much shorter than its description in the quarantine.
_MOST_LISTED = 10_000
# The fraction among fewer records is too uncertain to stop a job. At the end it is always checked.
_RECORDS_BEFORE_CHECK = 10_000
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class File(WorkUnit):
    """An input file, of which the first pass finds the units."""

    number: int = 0


class FileRecord(UnitOutcome):
    """The hash of an input file, and its units."""

    sha256: str
    units: list[Unit]


def preprocess(
    job: Job, workers: Workers, *, max_bad_fraction: float = 0.01, share: JobShare = (0, 1)
) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what the corpus holds.
        workers: do the units.
        max_bad_fraction: the largest fraction of the records that may be rejected.
        share: this job's, of the jobs that make the same corpus at the same time. Any of them can
            finish it alone.

    Raises:
        OutputError: the folder holds something that is not a corpus.
        DataError: the input, the tokenizer or the records cannot be used; the folder holds another
            corpus; or the disk is full.
        OSError: a file cannot be read or written.
    """  # noqa: DOC501
    tokenizer = load_tokenizer(job.tokenizer, end_of_document=job.end_of_document)
    plan = plan_of(job, tokenizer)
    make = partial(_make_corpus, job, plan, workers, share, max_bad_fraction)
    try:
        return complete(job.output, plan, make)
    except OSError as fault:
        if not is_full_disk(fault):
            raise
        raise _full_disk_error(job, fault) from None


def _make_corpus(
    job: Job,
    plan: CorpusPlan,
    workers: Workers,
    share: JobShare,
    max_bad_fraction: float,
    state: Path,
) -> Manifest:
    """Fills the folder of `job`, whose unfinished work is in `state`, and returns its manifest."""
    files: list[File] = []
    for number, (path, size) in enumerate(plan.inputs):
        files.append(File(f"{number:05d}.ranges", size, path, number))
    _logger.info("%s: reads %s", job.output, shown_size([file.size for file in files]))

    split = partial(split_units, job.keys, plan.unit_size)
    found = dict(run_units(state, FileRecord, split, files, workers, share, what="finding units"))
    units: list[Unit] = []
    inputs: list[InputFile] = []
    for file in files:
        file_record = found[file.name]
        units.extend(file_record.units)
        inputs.append(InputFile(path=file.path, bytes=file.size, sha256=file_record.sha256))

    finished = _FinishedUnits(job, state, max_bad_fraction)
    work = partial(tokenize_unit, job)
    records = run_units(state, UnitRecord, work, units, workers, share, what="tokenizing")
    for name, record in records:
        finished.add(name, record)
        if finished.total >= _RECORDS_BEFORE_CHECK:
            finished.check()
    finished.check()
    finished.check_has_documents()

    compare_documents(job, finished.training_shards(units), workers, share)
    if finished.rejected:
        finished.publish_quarantine(units)
    # The held-out part is completed first: a finished training part must have its own beside it.
    if plan.heldout_fraction > 0:
        heldout = {unit.name: finished.records[unit.name].heldout for unit in units}
        manifest = manifest_of(plan, "heldout", heldout, inputs, finished.rejected)
        publish(manifest, heldout_of(job.output))
    train = {unit.name: finished.records[unit.name].train for unit in units}
    return manifest_of(plan, job.part, train, inputs, finished.rejected)


class _FinishedUnits:
    """The records of the units that are finished, and what they hold together."""

    def __init__(self, job: Job, state: Path, max_bad_fraction: float) -> None:
        self.records: dict[str, UnitRecord] = {}
        self.rejected: Counter[str] = Counter()
        self.total = 0
        """how many records were read, rejected ones included"""
        self._counts = Counts()
        self._job = job
        self._state = state
        self._max_bad_fraction = max_bad_fraction

    def add(self, name: str, record: UnitRecord) -> None:
        self.records[name] = record
        self.rejected.update(record.rejected)
        self.total += sum(record.rejected.values())
        for part in (record.train, record.heldout):
            self.total += part.documents
            self._counts.tokens += part.tokens
            self._counts.characters += part.characters
            self._counts.unknown_tokens += part.unknown_tokens
            self._counts.lost_characters += part.lost_characters

    def check(self) -> None:
        """Compares the fractions of rejected records and of unknown text with what is allowed.

        Raises:
            DataError: one of them is larger.
        """
        if self.rejected.total() > self._max_bad_fraction * self.total:
            raise self._too_many_rejected()
        if self._counts.unknown_fraction > self._job.corpus.max_unknown_fraction:
            raise self._too_many_unknown()

    def check_has_documents(self) -> None:
        """Makes sure that there is something to train on.

        Raises:
            DataError: no unit has a training document.
        """
        if not any(record.train.documents for record in self.records.values()):
            named = ", ".join(self._job.corpus.input)
            raise DataError(
                f"{named}: no usable document in {self.total} records: {dict(self.rejected)}"
            )

    def training_shards(self, units: Sequence[Unit]) -> dict[Path, str]:
        """The training shards, each with the input file that its documents come from."""
        shards: dict[Path, str] = {}
        for unit in units:
            if self.records[unit.name].train.documents:
                shards[self._job.output / unit.name] = unit.path
        return shards

    def publish_quarantine(self, units: Sequence[Unit]) -> None:
        """Joins the units' lists of rejected records, in the order of the input."""
        with published_file(self._job.output / QUARANTINE, self._state) as whole:
            for unit in units:
                if self.records[unit.name].rejected:
                    whole.write(quarantine_of(self._state, unit.name).read_bytes())

    def _too_many_rejected(self) -> DataError:
        """The error about too many rejected records, with three examples."""
        examples = list(islice(self._quarantined(), 3))
        shown = "; ".join(map(_shown_example, examples))
        advice = encoding_advice(input_path(example["file"]) for example in examples)
        if advice is None:
            advice = (
                "set text_key (--text-key), prompt_key, or for chats messages_key, or correct the "
                "input, and remove the output folder; or raise --max-bad-fraction and start again: "
                "finished work is kept"
            )
        return DataError(
            f"{self.rejected.total()} of {self.total} records are bad, more than "
            f"--max-bad-fraction {self._max_bad_fraction} allows: {shown}; {advice}"
        )

    def _quarantined(self) -> Iterator[dict[str, Any]]:
        """The rejected records that the finished units have listed."""
        for name, record in self.records.items():
            if record.rejected:
                for line in quarantine_of(self._state, name).read_bytes().splitlines():
                    yield orjson.loads(line)

    def _too_many_unknown(self) -> DataError:
        """The error about more text that the tokenizer cannot spell than the corpus allows."""
        counts = self._counts
        corpus = self._job.corpus
        if counts.lost_characters:
            lost = f"{counts.lost_characters:,} of {counts.characters:,} characters become nothing"
        else:
            lost = f"{counts.unknown_tokens:,} of {counts.tokens:,} tokens are unknown"
        return DataError(
            f"{self._job.tokenizer}: cannot spell the text of {', '.join(corpus.input)}: {lost}, "
            f"more than max_unknown_fraction {corpus.max_unknown_fraction} allows; take a "
            "tokenizer that has the language, or raise it (--max-unknown-fraction)"
        )


def _shown_example(rejected: dict[str, Any]) -> str:
    """A line of a quarantine, for a message."""
    excerpt = rejected["excerpt"][:60]
    shown = f"{rejected['file']} at {rejected['offset']}: {rejected['reason']} {excerpt!r}"
    if "detail" in rejected:
        shown = f"{shown} ({rejected['detail'][:120]})"
    return shown


def _full_disk_error(job: Job, fault: OSError) -> DataError:
    """The error about a full disk, with about how many bytes the corpus still needs."""
    advice = "finished work is kept"
    # The full disk is the fault to report, whatever else is wrong with the inputs.
    with contextlib.suppress(DataError, OSError):
        held = held_bytes(job.output) + held_bytes(heldout_of(job.output))
        needed = max(0, corpus_bytes(job) - held)
        advice = f"this corpus needs about {needed / 1e9:.3g} GB more, and {advice}"
    return DataError(f"{in_one_line(fault)}; {advice}", TRANSIENT_FAULT)


def plan_of(job: Job, tokenizer: Tokenizer) -> CorpusPlan:
    """Looks for the input files of `job`, and describes what it makes with its `tokenizer`.

    Raises:
        DataError: one of the files cannot be used.
    """
    files = input_files(job.corpus.input)
    keys = job.keys
    if is_text(job.corpus.input):
        backend = _encoder(job, tokenizer).name
        special_tokens = _special_tokens(job, tokenizer)
    else:
        backend = "imported"
        special_tokens = None
    return CorpusPlan(
        inputs=[(str(file), size) for file, size in files.items()],
        tokenizer=tokenizer.record(backend),
        text_key=keys.text,
        prompt_key=keys.prompt,
        document=keys.document,
        chat_template=None if keys.chat is None else keys.chat.fingerprint,
        chat_date=None if keys.chat is None else keys.chat.date,
        encoding=keys.encoding,
        quoting=keys.quoting,
        normalize=keys.normalize,
        special_tokens=special_tokens,
        heldout_fraction=job.corpus.heldout_fraction,
        heldout_by="words",
        unit_size=job.unit_bytes or default_unit_bytes(sum(files.values())),
        # To be raised where units are cut otherwise, so that no job goes on with other ranges.
        version=4,
    )


def split_units(keys: Keys, unit_bytes: int, file: File) -> FileRecord:
    """The work of the first pass."""
    path = input_path(file.path)
    # A remote file is not read only for its hash: the tag that its store keeps stands for it.
    if isinstance(path, RemoteFile):
        digest = path.identity()
    elif file.size <= _HASHED_BYTES:
        digest = file_hash(path)
    else:
        # Reading a very large file only for its hash would take as long as tokenizing it.
        digest = f"sampled:{sampled_hash(path, _SAMPLED_BLOCKS)}"
    return FileRecord(sha256=digest, units=split_file(path, file.number, keys, unit_bytes))


def remarks(manifest: Manifest) -> Iterator[str]:
    """What the maker of a corpus should know of its texts."""
    if manifest.special_tokens_spelled > 0:
        kept = "as text" if manifest.special_tokens == "text" else "as these tokens"
        spelled = manifest.special_tokens_spelled
        yield f"{spelled:,} special tokens are spelled in the texts, kept {kept}"
    if manifest.unknown_tokens > 0:
        fraction = manifest.unknown_tokens / manifest.tokens
        yield f"{manifest.unknown_tokens:,} tokens are unknown ({fraction:.2%})"
    if manifest.lost_characters > 0:
        fraction = manifest.lost_characters / manifest.characters
        lost = manifest.lost_characters
        yield f"{lost:,} characters cannot be spelled and are gone ({fraction:.2%})"
    if manifest.decomposed_documents > 0:
        yield (
            f"{manifest.decomposed_documents:,} documents are not in Unicode's NFC "
            "(normalize: nfc would bring them to it)"
        )


# --- The work on a unit ---------------------------------------------------------------------------


def tokenize_unit(job: Job, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards.

    Raises:
        DataError: there is an id outside the tokenizer's vocabulary, the encoders differ, or the
            file cannot be read.
    """
    tokenizer = cached_tokenizer(job.tokenizer, job.end_of_document)
    state = job.output / STATE
    dtype = token_dtype(tokenizer.vocab_size)
    rejected: Counter[str] = Counter()
    listed: list[bytes] = []
    with (
        writing_shard(job.output / unit.name, dtype, state) as train_writer,
        writing_shard(heldout_of(job.output) / unit.name, dtype, state) as heldout_writer,
    ):
        train = _Part(train_writer, tokenizer, job)
        heldout = _Part(heldout_writer, tokenizer, job)
        fraction = job.corpus.heldout_fraction
        for record in _records_of(unit, job, tokenizer):
            if isinstance(record, Rejected):
                rejected[record.reason] += 1
                if len(listed) < _MOST_LISTED:
                    listed.append(_quarantine_line(unit, record))
            elif fraction > 0 and _is_heldout(record, fraction):
                heldout.add(record)
            else:
                train.add(record)
        train.write_batch()
        heldout.write_batch()
    # Leaving the block publishes the shards, and only then are the contents of their files known.
    return UnitRecord(
        train=train.counted(),
        heldout=heldout.counted(),
        rejected=dict(sorted(rejected.items())),
        quarantine=_publish_list(quarantine_of(state, unit.name), listed),
        letters=_publish_letters(letters_of(state, unit.name), train.letters),
    )


def _records_of(unit: Unit, job: Job, tokenizer: Tokenizer) -> Iterator[Record]:
    if unit.kind == "tokens":
        return _imported(unit, tokenizer)
    return unit_records(unit, job.keys)


def _publish_list(path: Path, lines: list[bytes]) -> FileContent | None:
    """Writes the rejected records of a unit, if there are any."""
    if not lines:
        return None
    with published_file(path) as file:
        file.writelines(lines)
    return content_of(path)


def _publish_letters(path: Path, hashes: list[bytes]) -> FileContent | None:
    """Writes the hashes of the letters of a unit's training documents, if there are any."""
    if not hashes:
        return None
    with published_file(path) as file:
        np.save(file, np.frombuffer(b"".join(hashes), np.uint64))
    return content_of(path)


def _quarantine_line(unit: Unit, record: Rejected) -> bytes:
    """What the quarantine says of a rejected record."""
    shown = record._asdict()
    shown["excerpt"] = record.excerpt.decode(errors="backslashreplace")
    if not record.detail:
        del shown["detail"]
    return orjson.dumps({"file": unit.path, **shown}, option=orjson.OPT_APPEND_NEWLINE)


def _is_heldout(document: Document, fraction: float) -> bool:
    """Whether a document belongs to the held-out share."""
    # The reader's bytes are of the text alone. With a prompt, or in a group, another text decides.
    utf8 = None
    if document.prompt is None and not document.group:
        utf8 = document.utf8
    return is_heldout(document.held_out_by, fraction, utf8=utf8)


def _encoder(job: Job, tokenizer: Tokenizer) -> Encoder:
    if job.reference_only or tokenizer.fast is None:
        return tokenizer.reference
    return tokenizer.fast


def _special_tokens(job: Job, tokenizer: Tokenizer) -> SpecialTokens:
    """What a text of `job` that spells a special token becomes."""
    if job.corpus.messages_key is not None:
        # A chat template spells the special tokens that it means.
        return "control"
    return cached_speller(tokenizer, tokenizer.reference, job.corpus.special_tokens).special_tokens


def _imported(unit: Unit, tokenizer: Tokenizer) -> Iterator[Record]:
    """The documents of tokens that Megatron-LM made.

    They come without the tokens that this tokenizer puts before and after a document.
    """  # noqa: DOC501
    shard = Shard(Path(unit.path).with_suffix(""))
    start = list(tokenizer.document_start)
    end = list(tokenizer.document_end)
    for number in range(unit.start, unit.stop):
        ids = shard.document(number).tolist()
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise DataError(
                f"{shard.bin_path}: document {number}: expected ids from 0 to "
                f"{tokenizer.vocab_size - 1} of {tokenizer.path}, found {min(ids)} to {max(ids)}; "
                "name the tokenizer that made it"
            )
        if ids[: len(start)] == start:
            ids = ids[len(start) :]
        # With no end tokens `ids[-0:]` is the whole list, and is not equal to `end`.
        if ids[-len(end) :] == end:
            ids = ids[: -len(end)]
        if ids:
            yield Document(tokenizer.decode(ids), ids=ids)
        else:
            yield Rejected(number, "empty_text", b"")


class _Part:
    """Collects the documents of one part of a unit, encodes them in batches and writes them.

    Either all documents have a prompt or none. Prompt and text are encoded separately, so that the
    tokens of a prompt do not depend on the text after it.
    """

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, job: Job) -> None:
        self.writer = writer
        self._tokenizer = tokenizer
        self._job = job
        self._is_chat = job.corpus.messages_key is not None
        wanted: SpecialTokens | None = "control" if self._is_chat else job.corpus.special_tokens
        self._speller = cached_speller(tokenizer, _encoder(job, tokenizer), wanted)
        self._counts = UnitPart()
        self._is_compared = job.part == "train" and bool(job.apart_from)
        self.letters: list[bytes] = []
        """by which the documents are compared with those that are held out"""
        self._batch: list[Document] = []
        self._batch_bytes = 0

    def counted(self) -> UnitPart:
        """The counts of everything written, and what the published files hold."""
        written = {
            "documents": self.writer.documents,
            "tokens": self.writer.tokens,
            "files": self.writer.files,
        }
        return self._counts.model_copy(update=written)

    def add(self, document: Document) -> None:
        self._batch.append(document)
        self._batch_bytes += document.utf8_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self.write_batch()

    def write_batch(self) -> None:
        """Encodes and writes the documents collected since the last batch."""
        if not self._batch:
            return
        start = self._tokenizer.document_start
        end = self._tokenizer.document_end
        ids, lengths = self._encoded()
        # A token past the vocabulary would index the embedding out of range in training.
        largest = max(int(ids.max(initial=0)), *start, *end)
        if largest >= self._tokenizer.vocab_size:
            raise DataError(
                f"{self._tokenizer.path}: expected ids below {self._tokenizer.vocab_size}, "
                f"found {largest} around a document; "
                "name the token that ends one with --end-of-document"
            )
        prompt_lengths = None
        if self._batch[0].prompt is not None:
            # `_encoded` returns prompt and answer of each document in turn.
            prompts, answers = lengths.reshape(-1, 2).T
            lengths = prompts + answers
            # What stands before a document is read with its prompt, not predicted.
            prompt_lengths = len(start) + prompts
            self._counts.prompt_tokens += int(prompt_lengths.sum())
            for document in self._batch:
                self._counts.prompt_bytes += len((document.prompt or "").encode())
        framed = _framed(ids.astype(self.writer.dtype), lengths, start, end)
        self.writer.add(framed, lengths + len(start) + len(end), prompt_lengths)
        self._count_texts()
        self._batch = []
        self._batch_bytes = 0

    def _count_texts(self) -> None:
        """Counts what is in the batch's texts, and hashes their letters where they are compared."""
        characters = 0
        decomposed = 0
        for document in self._batch:
            text = document.whole_text
            characters += len(text)
            # ASCII is in every form of Unicode, and takes no time to find.
            if not text.isascii() and not is_normalized("NFC", text):
                decomposed += 1
            if self._is_compared:
                utf8 = document.utf8 if document.prompt is None else None
                self.letters.append(hash_of_letters(text, utf8))
        self._counts.characters += characters
        self._counts.decomposed_documents += decomposed
        self._counts.bytes += self._batch_bytes

    def _encoded(self) -> Encoded:
        """The ids of the batch's texts; a document with a prompt is two texts."""
        if self._batch[0].ids is not None:
            return joined([document.ids or [] for document in self._batch])
        texts: list[str] = []
        utf8: list[bytes] = []
        for document in self._batch:
            if document.prompt is not None:
                texts.append(document.prompt)
                utf8.append(document.prompt.encode())
            texts.append(document.text)
            utf8.append(document.text.encode() if document.utf8 is None else document.utf8)
        # Another document in each batch, and the same one when a unit is done again.
        checked = texts[self.writer.documents % len(texts)]
        self._check_encoder(checked[:_CHECKED_CHARACTERS])
        spelled = self._speller.spell(texts, utf8)
        if not self._is_chat:
            # A chat's template spells special tokens, so there they are no finding.
            self._counts.special_tokens_spelled += spelled.special_tokens
        self._counts.unknown_tokens += spelled.unknown_tokens
        self._counts.lost_characters += spelled.lost_characters
        return spelled.encoded

    def _check_encoder(self, text: str) -> None:
        """Compares the fast encoder with the reference on `text`.

        Raises:
            DataError: they give other ids.
        """
        encoder = _encoder(self._job, self._tokenizer)
        reference = self._tokenizer.reference
        if encoder is not reference and not agree(encoder, reference, [text]):
            raise DataError(
                f"{encoder.name} and {reference.name} differ on {text[:60]!r}; "
                f"remove {self._job.output} and start again with --reference-only"
            )


def _framed(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> npt.NDArray[Any]:
    """The ids of documents, joined, with `start` before and `end` after each, of the same type.

    Args:
        ids: of all documents, one behind the other.
        lengths: of each document in `ids`.
        start: the tokens before each document.
        end: the tokens after each document.
    """
    stops = np.cumsum(lengths)
    starts = stops - lengths
    # A row for each document: where in `ids` each token of its frame is inserted. np.insert takes
    # places in the unchanged array, and keeps the order of several tokens at one place, so that the
    # end of a document precedes the start of the next.
    places = np.column_stack([starts] * len(start) + [stops] * len(end))
    frame = np.tile([*start, *end], len(lengths))
    return np.insert(ids, places.ravel(), frame)
