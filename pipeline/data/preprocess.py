"""Documents to a token corpus: a job whose units are ranges of the input files.

A unit is read, checked, encoded and written as a shard. Tokens of Megatron-LM are only framed anew. Rejected records
are listed in a quarantine, and too many of them stop the job.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel

from pipeline.data.corpora import Job, is_heldout
from pipeline.data.heldout import check_apart, shards_of
from pipeline.data.jobs import (
    QUARANTINE,
    STATE,
    Plan,
    Share,
    UnitPart,
    UnitRecord,
    complete,
    heldout_of,
    manifest_of,
    run_units,
)
from pipeline.data.records import Document, Keys, Rejected
from pipeline.data.text_streams import encoding_advice
from pipeline.data.token_corpus import MANIFEST, InputFile, Manifest
from pipeline.data.token_shards import Shard, ShardWriter, content_of, token_dtype, writing_shard
from pipeline.data.tokenizer import Encoded, Encoder, Tokenizer, agree, load_tokenizer
from pipeline.data.units import Unit, default_unit_bytes, input_files, is_text, split_file, unit_records
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import file_hash, published_file, sampled_hash

_BATCH_BYTES = 2 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048
# Of a larger file blocks are hashed: a job that shares a file of a terabyte would read all of it first.
_HASHED_BYTES, _SAMPLED_BLOCKS = 2**34, 2**14
# Of a unit. A bad record may be much shorter than its description.
_MOST_LISTED = 10_000
# The fraction among fewer records is too uncertain to stop a job. At the end of the job it is always checked.
_RECORDS_BEFORE_CHECK = 10_000


class _File(NamedTuple):
    """The unit of the first pass over the inputs."""

    name: str
    size: int
    path: str
    number: int

    def __str__(self) -> str:
        return self.path


class _FileRecord(BaseModel):
    """The hash of an input file and its units, which are known once a compressed one has been read."""

    sha256: str
    units: list[Unit]


def preprocess(job: Job, workers: Workers, *, max_bad_fraction: float = 0.01, share: Share = (0, 1)) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what to make.
        workers: the processes that do the work.
        max_bad_fraction: the largest accepted fraction of bad records.
        share: this job's, of the jobs that make the same corpus at the same time. Any of them can finish it alone.

    Raises:
        DataError: the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    plan = plan_of(job, load_tokenizer(job.tokenizer, end_of_document=job.end_of_document))

    def make(state: Path) -> Manifest:
        files = [_File(f"{at:05d}.ranges", size, path, at) for at, (path, size) in enumerate(plan.inputs)]
        split = partial(_split, job.keys, plan.unit_size)
        found = dict(run_units(state, _FileRecord, split, files, workers, share, what="finding units"))
        units = [unit for file in files for unit in found[file.name].units]
        records: dict[str, UnitRecord] = {}
        rejected: Counter[str] = Counter()
        total = 0

        def check_rejected() -> None:
            if rejected.total() > max_bad_fraction * total:
                listed = (state / f"{name}.{QUARANTINE}" for name, record in records.items() if record.rejected)
                raise _too_many(rejected, total, max_bad_fraction, listed)

        work = partial(tokenize_unit, job)
        for name, record in run_units(state, UnitRecord, work, units, workers, share, what="tokenizing"):
            records[name] = record
            rejected.update(record.rejected)
            total += record.train.documents + record.heldout.documents + sum(record.rejected.values())
            if total >= _RECORDS_BEFORE_CHECK:
                check_rejected()
        check_rejected()
        if not any(record.train.documents for record in records.values()):
            raise DataError(f"{', '.join(job.corpus.input)}: no usable document in {total} records: {dict(rejected)}")
        if job.part == "heldout":  # of a training part that was made before it
            made = [path for path in job.apart_from if (path / MANIFEST).exists()]
            own = tuple(job.output / name for name, record in records.items() if record.train.documents)
            shards = [
                _File(f"{path.name}.{shard.name}", 1, str(shard), 0) for path in made for shard in shards_of(path)
            ]
            compare = partial(_compare, job, own)
            for _ in run_units(
                state, UnitPart, compare, shards, workers, share, what="comparing", measured_in=" shards"
            ):
                pass
        if rejected:
            with published_file(job.output / QUARANTINE, state) as joined:
                for unit in units:
                    if records[unit.name].rejected:
                        joined.write((state / f"{unit.name}.{QUARANTINE}").read_bytes())
        inputs = [InputFile(path=file.path, bytes=file.size, sha256=found[file.name].sha256) for file in files]
        if plan.heldout_fraction > 0:
            heldout = {unit.name: records[unit.name].heldout for unit in units}
            manifest_of(plan, "heldout", heldout, inputs, rejected=rejected).save(heldout_of(job.output))
        train = {unit.name: records[unit.name].train for unit in units}
        quarantine = content_of(job.output / QUARANTINE) if rejected else None
        return manifest_of(plan, job.part, train, inputs, rejected=rejected, quarantine=quarantine)

    return complete(job.output, plan, make)


def plan_of(job: Job, tokenizer: Tokenizer) -> Plan:
    """Looks for the input files of `job`, and describes what it makes with its `tokenizer`.

    Raises:
        DataError: one of them cannot be used.
    """
    files, keys = input_files(job.corpus.input), job.keys
    return Plan(
        inputs=[(str(file), size) for file, size in files.items()],
        tokenizer=tokenizer.record(_encoder(job, tokenizer).name if is_text(job.corpus.input) else "imported"),
        text_key=keys.text,
        prompt_key=keys.prompt,
        document=keys.document,
        chat_template=None if keys.chat is None else keys.chat.fingerprint,
        encoding=keys.encoding,
        heldout_fraction=job.corpus.heldout_fraction,
        unit_size=job.unit_bytes or default_unit_bytes(sum(files.values())),
        version=2,
    )


def _split(keys: Keys, unit_bytes: int, file: _File) -> _FileRecord:
    path = Path(file.path)
    digest = file_hash(path) if file.size <= _HASHED_BYTES else f"sampled:{sampled_hash(path, _SAMPLED_BLOCKS)}"
    return _FileRecord(sha256=digest, units=split_file(path, file.number, keys, unit_bytes))


def _compare(job: Job, heldout: tuple[Path, ...], shard: _File) -> UnitPart:
    path, tokenizer = Path(shard.path), cached_tokenizer(job.tokenizer, job.end_of_document)
    check_apart(path, shards_of(path.parent)[path], heldout, tokenizer)
    return UnitPart()


def _too_many(rejected: Counter[str], total: int, fraction: float, quarantines: Iterable[Path]) -> DataError:
    """The error about too many rejected records: three examples, and what to do about the most frequent reason."""
    lines = (orjson.loads(line) for path in quarantines for line in path.read_bytes().splitlines())
    examples = list(islice(lines, 3))
    shown = "; ".join(f"{one['file']} at {one['offset']}: {one['reason']} {one['excerpt'][:60]!r}" for one in examples)
    reason = rejected.most_common(1)[0][0]
    if reason in ("no_text_key", "no_prompt_key"):
        key = reason.removeprefix("no_")
        advice = (
            f"set {key} (--{key.replace('_', '-')}) to one of the keys, for chats messages_key (--messages-key), and "
            "remove the output folder"
        )
    else:
        advice = next(filter(None, (encoding_advice(Path(one["file"])) for one in examples)), None) or (
            "raise --max-bad-fraction and start again (finished work is kept), or correct the input and remove the "
            "output folder"
        )
    return DataError(
        f"{rejected.total()} of {total} records are bad, more than --max-bad-fraction {fraction} allows: {shown}; "
        f"{advice}"
    )


# --- The work on a unit ----------------------------------------------------------------------------------------------


def tokenize_unit(job: Job, unit: Unit) -> UnitRecord:
    """Tokenizes `unit` and publishes its shards.

    Raises:
        DataError: there is an id outside the tokenizer's vocabulary, the encoders differ, or the file cannot be read.
    """
    tokenizer, state = cached_tokenizer(job.tokenizer, job.end_of_document), job.output / STATE
    fraction = job.corpus.heldout_fraction
    rejected: Counter[str] = Counter()
    listed: list[bytes] = []
    with ExitStack() as files:

        def part(folder: Path) -> _Part:
            dtype = token_dtype(tokenizer.vocab_size)
            return _Part(files.enter_context(writing_shard(folder / unit.name, dtype, state)), tokenizer, job)

        train = part(job.output)
        heldout = part(heldout_of(job.output)) if fraction else train
        for record in _imported(unit, tokenizer) if unit.kind == "tokens" else unit_records(unit, job.keys):
            if isinstance(record, Rejected):
                rejected[record.reason] += 1
                if len(listed) < _MOST_LISTED:
                    shown = record._asdict() | {"excerpt": record.excerpt.decode(errors="backslashreplace")}
                    listed.append(orjson.dumps({"file": unit.path, **shown}, option=orjson.OPT_APPEND_NEWLINE))
            else:
                (heldout if fraction and is_heldout(record.held_out_by, fraction) else train).add(record)
        train.write_batch()
        heldout.write_batch()
    if job.part == "train" and train.outcome.documents and job.apart_from:
        check_apart(job.output / unit.name, str(unit), chain.from_iterable(map(shards_of, job.apart_from)), tokenizer)
    if listed:
        with published_file(state / f"{unit.name}.{QUARANTINE}") as file:
            file.writelines(listed)
    counts = dict(sorted(rejected.items()))
    return UnitRecord(train=train.outcome, heldout=heldout.outcome if fraction else UnitPart(), rejected=counts)


@lru_cache(maxsize=1)
def cached_tokenizer(path: Path, end_of_document: str | None) -> Tokenizer:
    """The tokenizer of a job, read once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use every core
    return load_tokenizer(path, end_of_document=end_of_document)


def _encoder(job: Job, tokenizer: Tokenizer) -> Encoder:
    return tokenizer.reference if job.reference_only or tokenizer.fast is None else tokenizer.fast


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
        yield Document(tokenizer.decode(ids), ids=ids) if ids else Rejected(number, "empty_text", b"")


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
        self._batch_bytes += document.utf8_bytes
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
            counts.prompt_bytes += sum(len((document.prompt or "").encode()) for document in batch)
        start, end = tokenizer.document_start, tokenizer.document_end
        framed = _framed(ids, lengths, start, end)
        self._writer.add(framed, lengths + len(start) + len(end), prompt_lengths)
        counts.documents += len(batch)
        counts.tokens += len(framed)
        counts.characters += sum(len(document.whole_text) for document in batch)
        counts.bytes += self._batch_bytes
        self._batch, self._batch_bytes = [], 0

    def _encoded(self) -> Encoded:
        """The ids of the batch's texts, of a document with a prompt two."""
        tokenizer, reference = self._tokenizer, self._tokenizer.reference
        texts = [text for document in self._batch for text in (document.prompt, document.text) if text is not None]
        encoder = _encoder(self._job, tokenizer)
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


def _framed(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> npt.NDArray[Any]:
    """The joined documents `ids: [T]`, of `lengths: [documents]`, each with `start` before and `end` after it."""
    stops = np.cumsum(lengths)
    places = np.column_stack([*[stops - lengths] * len(start), *[stops] * len(end)])
    return np.insert(ids, places.ravel(), np.tile([*start, *end], len(lengths)))
