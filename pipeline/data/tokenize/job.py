"""Documents to a token corpus: a job whose units are ranges of the input files.

A unit is read, checked, encoded and written as a shard. Tokens of Megatron-LM are only framed anew. Rejected records
are listed in a quarantine, and too many of them stop the job.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
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
    Shard,
    ShardWriter,
    content_of,
    token_dtype,
    writing_shard,
)
from pipeline.data.corpus.manifest import Counts, InputFile, Manifest
from pipeline.data.sources.file_names import shown_size
from pipeline.data.sources.object_stores import RemoteFile, input_path
from pipeline.data.sources.records import Document, Keys, Rejected, SpecialTokens
from pipeline.data.sources.streams import encoding_advice
from pipeline.data.tokenize.contamination import compare_documents
from pipeline.data.tokenize.corpora import Job, is_heldout
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.queue import (
    QUARANTINE,
    STATE,
    Outcome,
    Plan,
    Share,
    UnitPart,
    UnitRecord,
    Work,
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

# The fast encoder is a tenth faster than with batches of a megabyte, and no faster with larger ones.
_BATCH_BYTES = 4 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048
# Of a larger file blocks are hashed: a job that shares a file of a terabyte would read all of it first.
_HASHED_BYTES, _SAMPLED_BLOCKS = 2**34, 2**14
_logger = log.get_logger(__name__)
# Of a unit. A bad record may be much shorter than its description.
_MOST_LISTED = 10_000
# The fraction among fewer records is too uncertain to stop a job. At the end of the job it is always checked.
_RECORDS_BEFORE_CHECK = 10_000


@dataclass(frozen=True)
class File(Work):
    """An input file, of which the first pass finds the units."""

    number: int = 0


class FileRecord(Outcome):
    """The hash of an input file and its units, which are known once a compressed one has been read."""

    sha256: str
    units: list[Unit]


def preprocess(
    job: Job, workers: Workers, *, max_bad_fraction: float = 0.01, share: Share = (0, 1)
) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    `share`: this job's, of the jobs that make the same corpus at the same time. Any of them can finish it alone.

    Raises DataError where the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    plan = plan_of(job, load_tokenizer(job.tokenizer, end_of_document=job.end_of_document))

    def make(state: Path) -> Manifest:
        sizes = [size for _, size in plan.inputs]
        _logger.info("%s: reads %s", job.output, shown_size(sizes))
        files = [
            File(f"{at:05d}.ranges", size, path, at) for at, (path, size) in enumerate(plan.inputs)
        ]
        split = partial(split_units, job.keys, plan.unit_size)
        found = dict(
            run_units(state, FileRecord, split, files, workers, share, what="finding units")
        )
        units = [unit for file in files for unit in found[file.name].units]
        records: dict[str, UnitRecord] = {}
        rejected: Counter[str] = Counter()
        total = 0

        def check_rejected() -> None:
            if rejected.total() > max_bad_fraction * total:
                listed = (
                    quarantine_of(state, name)
                    for name, record in records.items()
                    if record.rejected
                )
                raise _too_many(rejected, total, max_bad_fraction, listed)

        work = partial(tokenize_unit, job)
        for name, record in run_units(
            state, UnitRecord, work, units, workers, share, what="tokenizing"
        ):
            records[name] = record
            rejected.update(record.rejected)
            total += (
                record.train.documents + record.heldout.documents + sum(record.rejected.values())
            )
            if total >= _RECORDS_BEFORE_CHECK:
                check_rejected()
                _check_unknown(job, records.values())
        check_rejected()
        _check_unknown(job, records.values())
        if not any(record.train.documents for record in records.values()):
            raise DataError(
                f"{', '.join(job.corpus.input)}: no usable document in {total} records: {dict(rejected)}"
            )
        written = {
            job.output / unit.name: unit.path
            for unit in units
            if records[unit.name].train.documents
        }
        compare_documents(job, written, workers, share)
        if rejected:
            with published_file(job.output / QUARANTINE, state) as whole:
                for unit in units:
                    if records[unit.name].rejected:
                        whole.write(quarantine_of(state, unit.name).read_bytes())
        inputs = [
            InputFile(path=file.path, bytes=file.size, sha256=found[file.name].sha256)
            for file in files
        ]
        if plan.heldout_fraction > 0:
            heldout = {unit.name: records[unit.name].heldout for unit in units}
            publish(manifest_of(plan, "heldout", heldout, inputs, rejected), heldout_of(job.output))
        return manifest_of(
            plan,
            job.part,
            {unit.name: records[unit.name].train for unit in units},
            inputs,
            rejected,
        )

    try:
        return complete(job.output, plan, make)
    except OSError as fault:
        if not is_full_disk(fault):
            raise
        advice = "finished work is kept"
        with contextlib.suppress(
            DataError, OSError
        ):  # the full disk is the fault to report, whatever else there is
            needed = max(
                0, corpus_bytes(job) - held_bytes(job.output) - held_bytes(heldout_of(job.output))
            )
            advice = f"this corpus needs about {needed / 1e9:.3g} GB more, and {advice}"
        raise DataError(f"{in_one_line(fault)}; {advice}", TRANSIENT_FAULT) from None


def plan_of(job: Job, tokenizer: Tokenizer) -> Plan:
    """Looks for the input files of `job`, and describes what it makes with its `tokenizer`.

    Raises DataError where one of them cannot be used.
    """
    files, keys = input_files(job.corpus.input), job.keys
    return Plan(
        inputs=[(str(file), size) for file, size in files.items()],
        tokenizer=tokenizer.record(
            _encoder(job, tokenizer).name if is_text(job.corpus.input) else "imported"
        ),
        text_key=keys.text,
        prompt_key=keys.prompt,
        document=keys.document,
        chat_template=None if keys.chat is None else keys.chat.fingerprint,
        chat_date=None if keys.chat is None else keys.chat.date,
        encoding=keys.encoding,
        quoting=keys.quoting,
        normalize=keys.normalize,
        special_tokens=_special_tokens(job, tokenizer) if is_text(job.corpus.input) else None,
        heldout_fraction=job.corpus.heldout_fraction,
        heldout_by="words",
        unit_size=job.unit_bytes or default_unit_bytes(sum(files.values())),
        version=4,
    )


def split_units(keys: Keys, unit_bytes: int, file: File) -> FileRecord:
    """The work of the first pass."""
    path = input_path(file.path)
    if isinstance(path, RemoteFile):
        digest = path.identity()
    elif file.size <= _HASHED_BYTES:
        digest = file_hash(path)
    else:
        digest = f"sampled:{sampled_hash(path, _SAMPLED_BLOCKS)}"
    return FileRecord(sha256=digest, units=split_file(path, file.number, keys, unit_bytes))


def _too_many(
    rejected: Counter[str], total: int, fraction: float, quarantines: Iterable[Path]
) -> DataError:
    """The error about too many rejected records, with three examples."""
    lines = (orjson.loads(line) for path in quarantines for line in path.read_bytes().splitlines())
    examples = list(islice(lines, 3))
    shown = "; ".join(map(_example, examples))
    advice = encoding_advice(input_path(one["file"]) for one in examples) or (
        "set text_key (--text-key), prompt_key, or for chats messages_key, or correct the input, and remove the output "
        "folder; or raise --max-bad-fraction and start again: finished work is kept"
    )
    return DataError(
        f"{rejected.total()} of {total} records are bad, more than --max-bad-fraction {fraction} allows: {shown}; "
        f"{advice}"
    )


def remarks(manifest: Manifest) -> Iterator[str]:
    """What the maker of a corpus should know of its texts."""
    if (spelled := manifest.special_tokens_spelled) > 0:
        kept = "as text" if manifest.special_tokens == "text" else "as these tokens"
        yield f"{spelled:,} special tokens are spelled in the texts, kept {kept}"
    if (unknown := manifest.unknown_tokens) > 0:
        yield f"{unknown:,} tokens are unknown ({unknown / manifest.tokens:.2%})"
    if (lost := manifest.lost_characters) > 0:
        yield f"{lost:,} characters cannot be spelled and are gone ({lost / manifest.characters:.2%})"
    if (decomposed := manifest.decomposed_documents) > 0:
        yield f"{decomposed:,} documents are not in Unicode's NFC (normalize: nfc would bring them to it)"


def _example(rejected: dict[str, Any]) -> str:
    """A line of a quarantine, for a message."""
    shown = f"{rejected['file']} at {rejected['offset']}: {rejected['reason']} {rejected['excerpt'][:60]!r}"
    return f"{shown} ({rejected['detail'][:120]})" if "detail" in rejected else shown


def _check_unknown(job: Job, records: Iterable[UnitRecord]) -> None:
    """Raises DataError where the tokenizer cannot spell more of the text than the corpus allows."""
    total = Counts()
    for record in records:
        for part in (record.train, record.heldout):
            total.tokens += part.tokens
            total.characters += part.characters
            total.unknown_tokens += part.unknown_tokens
            total.lost_characters += part.lost_characters
    most = job.corpus.max_unknown_fraction
    if total.unknown_fraction > most:
        lost = f"{total.lost_characters:,} of {total.characters:,} characters become nothing"
        unknown = f"{total.unknown_tokens:,} of {total.tokens:,} tokens are unknown"
        raise DataError(
            f"{job.tokenizer}: cannot spell the text of {', '.join(job.corpus.input)}: "
            f"{lost if total.lost_characters else unknown}, more than max_unknown_fraction {most} allows; take a "
            "tokenizer that has the language, or raise it (--max-unknown-fraction)"
        )


# --- The work on a unit ----------------------------------------------------------------------------------------------


def tokenize_unit(job: Job, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards.

    Raises DataError where there is an id outside the tokenizer's vocabulary, the encoders differ, or the file cannot be
    read.
    """
    tokenizer, state = cached_tokenizer(job.tokenizer, job.end_of_document), job.output / STATE
    fraction = job.corpus.heldout_fraction
    rejected: Counter[str] = Counter()
    listed: list[bytes] = []
    with ExitStack() as files:

        def part(folder: Path) -> _Part:
            dtype = token_dtype(tokenizer.vocab_size)
            return _Part(
                files.enter_context(writing_shard(folder / unit.name, dtype, state)), tokenizer, job
            )

        train = part(job.output)
        heldout = part(heldout_of(job.output))
        if unit.kind == "tokens":
            records = _imported(unit, tokenizer)
        else:
            records = unit_records(unit, job.keys)
        for record in records:
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
    letters = None
    if train.letters:
        path = letters_of(state, unit.name)
        with published_file(path) as file:
            np.save(file, np.frombuffer(b"".join(train.letters), np.uint64))
        letters = content_of(path)
    quarantine = None
    if listed:
        path = quarantine_of(state, unit.name)
        with published_file(path) as file:
            file.writelines(listed)
        quarantine = content_of(path)
    return UnitRecord(
        train=train.counted(),
        heldout=heldout.counted(),
        rejected=dict(sorted(rejected.items())),
        quarantine=quarantine,
        letters=letters,
    )


def _quarantine_line(unit: Unit, record: Rejected) -> bytes:
    """What the quarantine says of a rejected record."""
    shown = record._asdict()
    shown["excerpt"] = record.excerpt.decode(errors="backslashreplace")
    if not record.detail:
        del shown["detail"]
    return orjson.dumps({"file": unit.path, **shown}, option=orjson.OPT_APPEND_NEWLINE)


def _is_heldout(document: Document, fraction: float) -> bool:
    """Whether a document belongs to the held-out share."""
    utf8 = None
    if document.prompt is None and not document.group:
        utf8 = document.utf8
    return is_heldout(document.held_out_by, fraction, utf8=utf8)


def _encoder(job: Job, tokenizer: Tokenizer) -> Encoder:
    return tokenizer.reference if job.reference_only or tokenizer.fast is None else tokenizer.fast


def _special_tokens(job: Job, tokenizer: Tokenizer) -> SpecialTokens:
    """What a text of `job` that spells a special token becomes. A chat's template spells those that it means."""
    if job.corpus.messages_key is not None:
        return "control"
    return cached_speller(tokenizer, tokenizer.reference, job.corpus.special_tokens).special_tokens


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
        yield (
            Document(tokenizer.decode(ids), ids=ids) if ids else Rejected(number, "empty_text", b"")
        )


class _Part:
    """Collects the documents of one part of a unit, encodes them in batches and writes them.

    Either all documents have a prompt or none. Prompt and text are encoded separately, so that the tokens of a prompt
    do not depend on the text after it.
    """

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, job: Job) -> None:
        self.writer, self._tokenizer, self._job = writer, tokenizer, job
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
        batch, counts = self._batch, self._counts
        if not batch:
            return
        start, end = self._tokenizer.document_start, self._tokenizer.document_end
        ids, lengths = self._encoded()
        largest = max(int(ids.max(initial=0)), *start, *end)
        if largest >= self._tokenizer.vocab_size:
            raise DataError(
                f"{self._tokenizer.path}: expected ids below {self._tokenizer.vocab_size}, "
                f"found {largest} around a document; "
                "name the token that ends one with --end-of-document"
            )
        prompt_lengths = None
        if batch[0].prompt is not None:
            prompts, answers = lengths.reshape(-1, 2).T
            lengths = prompts + answers
            prompt_lengths = len(start) + prompts
            counts.prompt_tokens += int(prompt_lengths.sum())
            counts.prompt_bytes += sum(len((document.prompt or "").encode()) for document in batch)
        framed = _framed(ids.astype(self.writer.dtype), lengths, start, end)
        self.writer.add(framed, lengths + len(start) + len(end), prompt_lengths)
        self._count_texts()
        self._batch, self._batch_bytes = [], 0

    def _count_texts(self) -> None:
        """Counts what is in the texts of the batch, and hashes their letters where they are compared."""
        characters = 0
        decomposed = 0
        for document in self._batch:
            text = document.whole_text
            characters += len(text)
            if not text.isascii() and not is_normalized("NFC", text):
                decomposed += 1
            if self._is_compared:
                utf8 = document.utf8 if document.prompt is None else None
                self.letters.append(hash_of_letters(text, utf8))
        self._counts.characters += characters
        self._counts.decomposed_documents += decomposed
        self._counts.bytes += self._batch_bytes

    def _encoded(self) -> Encoded:
        """The ids of the batch's texts, of a document with a prompt two."""
        if self._batch[0].ids is not None:
            return joined([document.ids or [] for document in self._batch])
        tokenizer, reference = self._tokenizer, self._tokenizer.reference
        texts: list[str] = []
        utf8: list[bytes] = []
        for document in self._batch:
            if document.prompt is not None:
                texts.append(document.prompt)
                utf8.append(document.prompt.encode())
            texts.append(document.text)
            utf8.append(document.text.encode() if document.utf8 is None else document.utf8)
        encoder = _encoder(self._job, tokenizer)
        checked = texts[self.writer.documents % len(texts)][:_CHECKED_CHARACTERS]
        if encoder is not reference and not agree(encoder, reference, [checked]):
            raise DataError(
                f"{encoder.name} and {reference.name} differ on {checked[:60]!r}; "
                f"remove {self._job.output} and start again with --reference-only"
            )
        spelled = self._speller.spell(texts, utf8)
        if not self._is_chat:  # its template spells special tokens
            self._counts.special_tokens_spelled += spelled.special_tokens
        self._counts.unknown_tokens += spelled.unknown_tokens
        self._counts.lost_characters += spelled.lost_characters
        return spelled.encoded


def _framed(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> npt.NDArray[Any]:
    """The ids of documents, joined, with `start` before and `end` after each, of the same type."""
    stops = np.cumsum(lengths)
    places = np.column_stack([*[stops - lengths] * len(start), *[stops] * len(end)])
    return np.insert(ids, places.ravel(), np.tile([*start, *end], len(lengths)))
