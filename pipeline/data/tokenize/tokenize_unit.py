"""The work on one unit: its records are read, held out, encoded, and published as shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    Shard,
    content_of,
    token_dtype,
    writing_shard,
)
from pipeline.data.sources.records import Document, Record, Rejected
from pipeline.data.tokenize.corpora import Job, is_heldout
from pipeline.data.tokenize.unit_documents import UnitDocuments
from pipeline.data.tokenize.unit_records import (
    STATE,
    UnitRecord,
    heldout_of,
    letters_of,
    quarantine_of,
)
from pipeline.data.tokenize.units import Unit, check_file_of, unit_records
from pipeline.data.tokenizer.load import Tokenizer, cached_tokenizer
from pipeline.errors import DataError
from pipeline.files.publishing import published_file

# Per unit. A bad record may be much shorter than its description in the quarantine.
_MOST_LISTED = 10_000


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
    rejected_bytes = 0
    listed: list[bytes] = []
    with (
        writing_shard(job.output / unit.name, dtype, state) as train_writer,
        writing_shard(heldout_of(job.output) / unit.name, dtype, state) as heldout_writer,
    ):
        train = UnitDocuments(train_writer, tokenizer, job)
        heldout = UnitDocuments(heldout_writer, tokenizer, job)
        fraction = job.corpus.heldout_fraction
        for record in _records_of(unit, job, tokenizer):
            if isinstance(record, Rejected):
                rejected[record.reason] += 1
                rejected_bytes += record.lost_bytes
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
        rejected_bytes=rejected_bytes,
        quarantine=_publish_list(quarantine_of(state, unit.name), listed),
        letters=_publish_letters(letters_of(state, unit.name), train.letters),
    )


def _records_of(unit: Unit, job: Job, tokenizer: Tokenizer) -> Iterator[Record]:
    if unit.kind != "tokens":
        yield from unit_records(unit, job.keys)
        return
    check_file_of(unit)
    yield from _imported(unit, tokenizer)
    check_file_of(unit)


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
    shown["size"] = record.lost_bytes
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
