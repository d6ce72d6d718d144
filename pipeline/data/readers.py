"""The records in files of JSONL, CSV, TSV, plain text, Parquet, and in JSON arrays, read in bounded memory."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Keys, Record, Rejected, missing_column, record_of
from pipeline.data.text_streams import Stream, encoding_advice
from pipeline.errors import DataError, faults_of_library

_BLOCK_BYTES = 4 << 20
# Past the end of a range only the rest of one document is needed, and going back in a compressed file is slow.
_BLOCK_BYTES_PAST_END = 64 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_KEYS = 20
_ARRAY_START = re.compile(rb"(?:%s)?\s*\[" % _BYTE_ORDER_MARK)
# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


class Line(NamedTuple):
    """A line without its line end, or a whole file. Beyond MAX_RECORD_BYTES `content` may be a beginning."""

    offset: int
    content: bytes
    size: int


def text_records(stream: Stream, kind: str, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records that begin in the bytes [start, stop) of a file; of a `kind` json_array, csv or tsv all of them.

    Where the stream is damaged, the incomplete last record is rejected with the fault as reason.
    """
    if kind == "json_array":
        return _array_records(stream, keys)
    if kind in ("csv", "tsv"):
        return _csv_records(stream, keys, "," if kind == "csv" else "\t")
    return _line_records(stream, start, stop, keys, is_json=kind == "jsonl")


def _line_records(stream: Stream, start: int, stop: int, keys: Keys, *, is_json: bool) -> Iterator[Record]:
    incomplete: Line | None = None
    for line in (_whole_file if keys.document == "file" else lines)(stream, start, stop):
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            incomplete = line
            continue
        # A file that others were appended to has a byte-order mark in its middle, too.
        content = line.content.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r")
        if line.size > MAX_RECORD_BYTES:
            yield Rejected(line.offset, "too_large", content[:EXCERPT_BYTES])
        elif content and not content.isspace():
            yield from _json_records(line.offset, content, keys) if is_json else [record_of(line.offset, content)]
    if not stream.read_at(stop, 1) and stream.fault:
        offset, excerpt = (stop, b"") if incomplete is None else (incomplete.offset, incomplete.content[:EXCERPT_BYTES])
        yield Rejected(offset, stream.fault, excerpt)


def lines(stream: Stream, start: int, stop: int) -> Iterator[Line]:
    """The lines that begin in [start, stop)."""
    offset = position = _first_line_start(stream, start, stop)
    pieces: list[bytes] = []  # of the line at `offset`, whose end has not been read
    size = 0
    while offset < stop:
        wanted = min(_BLOCK_BYTES, stop - position) if position < stop else _BLOCK_BYTES_PAST_END
        block = stream.read_at(position, wanted)
        if not block:
            break
        position += len(block)
        *ended, rest = block.split(b"\n")
        for content in ended:
            size += len(content)
            yield Line(offset, b"".join([*pieces, content]), size)
            offset += size + 1
            pieces, size = [], 0
            if offset >= stop:
                return
        pieces.append(rest)
        size += len(rest)
        if size > MAX_RECORD_BYTES:
            pieces = [b"".join(pieces)[:EXCERPT_BYTES]]
    if size:
        yield Line(offset, b"".join(pieces), size)


def _first_line_start(stream: Stream, start: int, stop: int) -> int:
    """Where the first line that begins in [start, stop) begins; `stop` if none does."""
    if start == 0:
        return 0
    position = start - 1  # the line that contains this byte belongs to the range before
    while position < stop and (block := stream.read_at(position, min(_BLOCK_BYTES, stop - position))):
        if (found := block.find(b"\n")) >= 0:
            return position + found + 1
        position += len(block)
    return stop


def _whole_file(stream: Stream, start: int, _: int) -> Iterator[Line]:
    content = _beginning(stream, MAX_RECORD_BYTES)
    yield Line(start, content.replace(b"\r\n", b"\n").rstrip(b"\n"), len(content))


def _beginning(stream: Stream, most: int) -> bytes:
    """The content of `stream`, or a little more than `most` bytes of it."""
    content = bytearray()
    while len(content) <= most and (block := stream.read_at(len(content), _BLOCK_BYTES)):
        content += block
    return bytes(content)


def _json_records(offset: int, content: bytes, keys: Keys) -> Iterator[Record]:
    """The record in a line of JSON; of a chat one for each answer."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = record_of(offset, content)
        is_utf8 = not isinstance(found, Rejected) or found.reason != "invalid_utf8"
        yield Rejected(offset, "malformed_json" if is_utf8 else "invalid_utf8", content[:EXCERPT_BYTES])
    else:
        yield from _records_in(offset, value, keys, content[:EXCERPT_BYTES])


def _records_in(offset: int, value: object, keys: Keys, excerpt: bytes = b"") -> Iterator[Record]:
    if not isinstance(value, dict):
        yield Rejected(offset, "not_an_object", excerpt or repr(value)[:EXCERPT_BYTES].encode(errors="replace"))
    elif missing := [key for key in keys.all if key not in value]:
        names = f"its keys: {', '.join(islice(value, _SHOWN_KEYS))}".encode()[:EXCERPT_BYTES]
        yield Rejected(offset, "no_text_key" if keys.text in missing else "no_prompt_key", names)
    elif keys.chat is not None:
        yield from keys.chat.records(offset, value[keys.text])
    else:
        yield record_of(offset, *map(value.__getitem__, keys.all))


# --- Files that only make sense from their beginning -----------------------------------------------------------------


def begins_array(stream: Stream) -> bool:
    return _ARRAY_START.match(stream.read_at(0, _BLOCK_BYTES)) is not None


def _array_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of the array that `stream` holds, which is read whole; offsets are their numbers."""
    try:
        values = orjson.loads(_beginning(stream, sys.maxsize).removeprefix(_BYTE_ORDER_MARK))
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{stream.path}: {stream.fault or 'not JSON'} ({error}); correct it, or write it as JSONL, an object a line"
        ) from None
    for number, value in enumerate(values):
        yield from _records_in(number, value, keys)


def _csv_records(stream: Stream, keys: Keys, delimiter: str) -> Iterator[Record]:
    """The records of a table whose first row names the columns; offsets are row numbers."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    texts = (
        line.content.removeprefix(_BYTE_ORDER_MARK).decode(errors="surrogateescape") + "\n"
        for line in lines(stream, 0, sys.maxsize)
        if not stream.fault
        or stream.read_at(line.offset + line.size, 1)  # the last line of a damaged file is not whole
    )
    rows = _rows(csv.reader(texts, delimiter=delimiter, strict=True))
    names = next(rows, [])
    if isinstance(names, csv.Error):
        raise DataError(f"{stream.path}: its first row does not name columns ({names}); correct it")
    if missing := missing_column(names, keys):
        raise DataError(f"{stream.path}: {encoding_advice([stream.path]) or missing}")
    places = [names.index(key) for key in keys.all]
    number = -1
    for number, row in enumerate(row for row in rows if row):  # without empty lines
        if isinstance(row, csv.Error):
            yield Rejected(number, "malformed_csv", str(row).encode())
        elif len(row) != len(names):
            yield Rejected(number, "malformed_csv", f"{len(row)} columns, not {len(names)}".encode())
        else:
            yield record_of(number, *(row[place].encode(errors="surrogateescape") for place in places))
    if stream.fault:
        yield Rejected(number + 1, stream.fault, b"")


def _rows(reader: Iterator[list[str]]) -> Iterator[list[str] | csv.Error]:
    """The rows of a table, or what is wrong with one."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield error


# --- Parquet: a range [start, stop) counts row groups ----------------------------------------------------------------


def parquet_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits a table into ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises DataError where the file is damaged, or lacks a column of `keys`.
    """
    ranges: list[tuple[int, int, int]] = []
    start = total = 0
    with _faults(path):
        file = _parquet(path, keys)
        leaves = [at for at in range(len(file.schema)) if file.schema.column(at).path.split(".")[0] in keys.all]
        for at, group in enumerate(map(file.metadata.row_group, range(file.num_row_groups))):
            total += sum(max(0, group.column(leaf).total_uncompressed_size) for leaf in leaves)
            if total >= unit_bytes or at == file.num_row_groups - 1:
                ranges.append((start, at + 1, total))
                start, total = at + 1, 0
    return ranges


def parquet_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of a range; offsets are row numbers. Raises as `parquet_ranges`."""
    with _faults(path):
        file = _parquet(path, keys)
        first = sum(file.metadata.row_group(group).num_rows for group in range(start))
        names, groups = [*{*keys.all}], range(start, stop)
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=names, use_threads=False):
            columns = [_values(batch.column(key)) for key in keys.all]
            for row, values in enumerate(zip(*columns, strict=True), first):
                if keys.chat is None:
                    yield record_of(row, *values)
                else:
                    yield from keys.chat.records(row, values[0])
            first += batch.num_rows


def _faults(path: Path) -> AbstractContextManager[None]:
    """Damaged files make pyarrow raise errors of many types."""
    return faults_of_library(f"{path}: damaged or not a complete Parquet file, copy it again", DataError)


def _parquet(path: Path, keys: Keys) -> Any:  # noqa: ANN401  # pyarrow has no type hints
    file = pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
    schema = file.schema_arrow
    if missing := missing_column(schema.names, keys):
        raise DataError(f"{path}: {missing}")
    for key in keys.all:
        if schema.names.count(key) > 1:
            raise DataError(f"{path}: has several columns {key!r}; rename all but one")
        found = schema.field(key).type
        found = found.value_type if pa.types.is_dictionary(found) else found
        if keys.chat is None and found not in _BYTES_OF:
            raise DataError(f"{path}: expected strings in the column {key!r}, found {found}; name another column")
    return file


def _values(column: pa.Array) -> list[Any]:
    """The values of a column, whose offsets lie within its data; text as bytes."""
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type in _BYTES_OF:
        column = column.view(_BYTES_OF[column.type])
    column.validate(full=True)
    return list(column.to_pylist())
