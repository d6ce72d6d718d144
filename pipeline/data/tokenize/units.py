"""The split of input files into units of work, and the records in a unit.

A unit is a range of one file, small enough that little is lost when a worker dies. The units follow
from the files and the unit size alone, never from the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from pipeline.data.corpus.indexed_dataset import Shard
from pipeline.data.sources.columns import (
    arrow_ranges,
    arrow_records,
    parquet_ranges,
    parquet_records,
)
from pipeline.data.sources.file_state import FileState, check_unchanged
from pipeline.data.sources.json_records import begins_array, begins_objects
from pipeline.data.sources.lines import line_end
from pipeline.data.sources.object_stores import InputPath, input_path
from pipeline.data.sources.readers import text_records
from pipeline.data.sources.records import Document, Keys, Record, composed
from pipeline.data.sources.streams import Stream, open_stream, text_length, text_per_byte
from pipeline.data.tokenize.input_files import TABLES, Kind, kind_of
from pipeline.data.tokenize.unit_records import WorkUnit
from pipeline.errors import DataError

# Kinds that only make sense from their beginning.
_READ_WHOLE = ("json_array", "json_objects", "csv", "tsv")
_FAULTS = {"truncated_file": "is truncated", "corrupt_file": "is damaged"}
_UNITS_PER_CORPUS = 64
_MIN_UNIT_BYTES = 4 * 2**20
_MAX_UNIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Unit(WorkUnit):
    """A range [start, stop) of a file: bytes of text, row groups or documents. `size` in bytes is
    approximate. `state`: the file as the job found it, for a job that goes on for long."""

    kind: Kind
    start: int
    stop: int
    state: FileState | None = None


def default_unit_bytes(total: int) -> int:
    """A unit size for `total` bytes: small inputs go to several workers, large ones are split into
    few shards."""
    return min(max(total // _UNITS_PER_CORPUS, _MIN_UNIT_BYTES), _MAX_UNIT_BYTES)


def split_file(path: InputPath, file_index: int, keys: Keys, unit_bytes: int) -> list[Unit]:
    """The units of one file, in order. A compressed file is read once for its length.

    Raises:
        DataError: a table or an index is damaged, or `keys` ask for what such a file does not have.
    """
    kind = kind_of(path)
    _check_keys(path, kind, keys)
    if kind == "tokens":
        ranges = _token_ranges(Path(str(path)), unit_bytes)
    elif kind == "parquet":
        ranges = parquet_ranges(path, keys, unit_bytes)
    elif kind == "arrow":
        ranges = arrow_ranges(path, keys, unit_bytes)
    else:
        length = _checked_length(path, keys)
        kind = layout_of(path, kind, keys)
        if kind in _READ_WHOLE or keys.document == "file":
            unit_bytes = max(length, 1)
        ranges = _byte_ranges(length, unit_bytes)
    units: list[Unit] = []
    for number, (start, stop, size) in enumerate(ranges):
        # The name orders the shards, and begins with the number of the file: see contamination.
        name = f"{file_index:05d}-{number:06d}"
        units.append(Unit(name, size, str(path), kind, start, stop))
    return units


def _check_keys(path: InputPath, kind: Kind, keys: Keys) -> None:
    """Compares what is asked for with what a file of this kind can have.

    Raises:
        DataError: the file cannot have it.
    """
    if keys.document != "line" and kind != "text":
        raise DataError(
            f"{path}: document {keys.document} is for .txt files; here each record is a document"
        )
    if keys.chat is not None and kind not in ("jsonl", *TABLES):
        raise DataError(
            f"{path}: chats are read from JSON or Parquet; write them as JSONL, a chat a line"
        )
    if keys.encoding is not None and kind in (*TABLES, "tokens"):
        raise DataError(f"{path}: encoding is for text files; Parquet and Arrow are UTF-8")
    if keys.prompt is not None and kind in ("text", "tokens"):
        raise DataError(
            f"{path}: a line has no {keys.prompt!r}; give texts with prompts as JSONL, CSV or "
            "Parquet"
        )


def _checked_length(path: InputPath, keys: Keys) -> int:
    """The bytes of text in a file.

    Raises:
        DataError: the file is damaged, and `keys` do not allow that.
    """
    length, fault = text_length(path, keys.encoding)
    if fault is not None and not keys.allow_damaged:
        raise DataError(
            f"{path}: {_FAULTS[fault]} after {length:,} bytes of text; copy it again, or set "
            "`allow_damaged: true` for the corpus (--allow-damaged) to read what precedes the "
            "damage"
        )
    return length


def _byte_ranges(length: int, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Ranges of `unit_bytes` that cover a text of `length` bytes; an empty text has one, too."""
    ranges: list[tuple[int, int, int]] = []
    for start in range(0, max(length, 1), unit_bytes):
        stop = min(start + unit_bytes, length)
        ranges.append((start, stop, stop - start))
    return ranges


def layout_of(path: InputPath, kind: Kind, keys: Keys) -> Kind:
    """The kind of a text file by its content: JSON that is not an object a line, and lines of old
    Macs."""
    if kind == "text":
        return "text_cr" if line_end(open_stream(path, keys.encoding)) == b"\r" else kind
    if kind == "jsonl":
        named_lines = ".json" not in [suffix.lower() for suffix in path.suffixes[-2:]]
        # LLaMA-Factory's data, among others, are one array of all records.
        if begins_array(open_stream(path, keys.encoding), named_lines=named_lines):
            return "json_array"
        if begins_objects(open_stream(path, keys.encoding)):
            return "json_objects"
    return kind


def beginning_of(path: InputPath, keys: Keys, most_bytes: int) -> tuple[Unit, float]:
    """The beginning of a file of text, and about how many bytes of text the whole file has.

    That is about `most_bytes` of lines; tables and arrays have no parts, so the unit is all of
    them. No compressed file is read to its end. Raises as `split_file`.
    """
    kind = kind_of(path)
    if kind in TABLES:
        ranges_of = parquet_ranges if kind == "parquet" else arrow_ranges
        ranges = ranges_of(path, keys, most_bytes)
        if not ranges:
            # A file without rows.
            return Unit("beginning", 0, str(path), kind, 0, 0), 0.0
        start, stop, size = ranges[0]
        whole_size = sum(size_of_range for _, _, size_of_range in ranges)
        return Unit("beginning", size, str(path), kind, start, stop), float(whole_size)
    whole = path.stat().st_size * text_per_byte(path)
    size = min(most_bytes, math.ceil(whole))
    return Unit("beginning", size, str(path), layout_of(path, kind, keys), 0, size), whole


def _token_ranges(path: Path, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Ranges of documents in a shard of Megatron-LM, of about `unit_bytes` each."""
    shard = Shard(path.with_suffix(""))
    # A damaged index could lead outside of its file.
    shard.check_index()
    size = shard.dtype.itemsize
    # A document is longer than a unit where several of these tokens are in it.
    firsts = {0}
    for token in range(0, shard.tokens, max(1, unit_bytes // size)):
        firsts.add(shard.document_at(token))
    cuts = [*sorted(firsts), shard.documents]
    ranges: list[tuple[int, int, int]] = []
    for first, following in pairwise(cuts):
        tokens = shard.document_start(following) - shard.document_start(first)
        ranges.append((first, following, size * tokens))
    return ranges


def check_file_of(unit: Unit) -> None:
    """Makes sure that the file of a unit is as the job found it.

    Raises:
        DataError: it changed.
    """
    if unit.state is not None:
        check_unchanged(input_path(unit.path), unit.state)


def unit_records(unit: Unit, keys: Keys) -> Iterator[Record]:
    """The records of a unit of text.

    The file is compared with the unit's state before the first record and after the last.

    Raises:
        DataError: the unit holds tokens, or its file changed.
    """
    check_file_of(unit)
    yield from _records_of(unit, keys)
    check_file_of(unit)


def _records_of(unit: Unit, keys: Keys) -> Iterator[Record]:
    path = input_path(unit.path)
    if unit.kind == "tokens":
        raise DataError(
            f"{path}: holds tokens, expected text; name text, for a held-out part as heldout_input"
        )
    if unit.kind == "parquet":
        records = parquet_records(path, unit.start, unit.stop, keys)
    elif unit.kind == "arrow":
        records = arrow_records(path, unit.start, unit.stop, keys)
    else:
        records = text_records(
            _cached_stream(path, keys.encoding), unit.kind, unit.start, unit.stop, keys
        )
    if keys.normalize == "nfc":
        records = map(composed, records)
    if keys.special_tokens == "control":
        records = map(_with_control, records)
    return records


def _with_control(record: Record) -> Record:
    """The record with the mark that special tokens in its text are these tokens."""
    if isinstance(record, Document):
        return record._replace(has_control=True)
    return record


@lru_cache(maxsize=1)
def _cached_stream(path: InputPath, encoding: str | None) -> Stream:
    """The stream of the last file: reading the next unit of a compressed file continues where the
    last unit ended."""
    return open_stream(path, encoding)
