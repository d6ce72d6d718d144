"""Documents to a token corpus: a job whose units are ranges of the input files.

A unit is read, checked, encoded and written as a shard. Tokens of Megatron-LM are not encoded
again: only the tokens around each document change. Rejected records are listed in a quarantine, and
too many of them stop the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline import log
from pipeline.data.corpus.manifest import InputFile, Manifest
from pipeline.data.sources.file_names import shown_size
from pipeline.data.sources.file_state import (
    FileState,
    check_all_unchanged,
    check_unchanged,
    state_of,
)
from pipeline.data.sources.object_stores import input_path
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.contamination import compare_documents
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.corpus_folder import CorpusPlan, complete, manifest_of, publish
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.finished_units import FinishedUnits, shown_example
from pipeline.data.tokenize.input_files import input_files, is_text
from pipeline.data.tokenize.queue import JobShare, run_units
from pipeline.data.tokenize.tokenize_unit import tokenize_unit
from pipeline.data.tokenize.unit_documents import encoder_of, special_tokens_of
from pipeline.data.tokenize.unit_records import (
    QUARANTINE,
    UnitOutcome,
    UnitRecord,
    WorkUnit,
    heldout_of,
)
from pipeline.data.tokenize.units import Unit, default_unit_bytes, split_file
from pipeline.data.tokenize.workers import Workers
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import TRANSIENT_FAULT, DataError, in_one_line, is_full_disk
from pipeline.files.disk_space import held_bytes

# The fraction among fewer records is too uncertain to stop a job. At the end it is always checked.
_RECORDS_BEFORE_CHECK = 10_000
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class File(WorkUnit):
    """An input file, of which the first pass finds the units."""

    number: int = 0


class FileRecord(UnitOutcome):
    """An input file as the job found it, and its units."""

    state: FileState
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
    if job.keys.chat is not None:
        job.keys.chat.say_start()
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
    states: list[tuple[str, FileState]] = []
    for file in files:
        file_record = found[file.name]
        units.extend(file_record.units)
        states.append((file.path, file_record.state))
        inputs.append(InputFile(file.path, file.size, file_record.state.digest))
    # Of a job that continues: at once, not at the first unit of a file that changed.
    check_all_unchanged(states)

    finished = FinishedUnits(job, state, max_bad_fraction)
    work = partial(tokenize_unit, job)
    records = run_units(state, UnitRecord, work, units, workers, share, what="tokenizing")
    for name, record in records:
        finished.add(name, record)
        if finished.total >= _RECORDS_BEFORE_CHECK:
            finished.check()
    finished.check()
    finished.check_has_documents()

    # What was read before a change is not what the inputs are now, and their hashes of neither.
    check_all_unchanged(states)
    compare_documents(job, finished.training_shards(units), workers, share)
    if finished.rejected:
        finished.publish_quarantine(units)
        _say_rejected(job, finished)
    # The held-out part is completed first: a finished training part must have its own beside it.
    if plan.heldout_fraction > 0:
        heldout = {unit.name: finished.records[unit.name].heldout for unit in units}
        manifest = manifest_of(plan, "heldout", heldout, inputs, finished.rejected)
        publish(manifest, heldout_of(job.output))
    train = {unit.name: finished.records[unit.name].train for unit in units}
    return manifest_of(plan, job.part, train, inputs, finished.rejected)


def _say_rejected(job: Job, finished: FinishedUnits) -> None:
    """Names the largest of the rejected records that were allowed."""
    largest = finished.largest_rejected()[0]
    message = "%s: %d records rejected, %d bytes of text; the largest: %s; all in %s"
    file = job.output / QUARANTINE
    counts = (finished.rejected.total(), finished.rejected_bytes)
    _logger.warning(message, job.output, *counts, shown_example(largest), file)


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
        backend = encoder_of(job, tokenizer).name
        special_tokens = special_tokens_of(job, tokenizer)
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
        version=5,
    )


def split_units(keys: Keys, unit_bytes: int, file: File) -> FileRecord:
    """The work of the first pass."""
    path = input_path(file.path)
    state = state_of(path)
    units: list[Unit] = []
    for unit in split_file(path, file.number, keys, unit_bytes):
        units.append(replace(unit, state=state))
    # A file that changes while it is split would have ranges of two contents.
    check_unchanged(path, state)
    return FileRecord(state=state, units=units)


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
