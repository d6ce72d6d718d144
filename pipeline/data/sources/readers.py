"""The records in files of JSONL, CSV, TSV, plain text, Parquet, Arrow, and in JSON arrays, read in bounded memory."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.sources.object_stores import InputPath, RemoteFile
from pipeline.data.sources.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    Document,
    Keys,
    Quoting,
    Reason,
    Record,
    Rejected,
    missing_column,
    record_of,
    value_at,
)
from pipeline.data.sources.streams import Stream, encoding_advice
from pipeline.errors import DataError, faults_of_library

_BLOCK_BYTES = 4 << 20
# Past the end of a range only the rest of one document is needed, and going back in a compressed file is slow.
_BLOCK_BYTES_PAST_END = 64 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_KEYS = 20
_MANY_LINES = 10
_LOOKING_LIKE_ROWS = 0.8
"""A quoted field of so many lines, so many of which have a row's delimiters, is likely due to a stray quote."""
_QUOTING: dict[str, Quoting] = {"csv": "standard", "tsv": "none"}
_UNCLOSED = "unexpected end of data"
"""What Python's csv says at the end of a file within a quoted field."""
_ARROW_FILE = b"ARROW1"
_ARRAY_START = re.compile(rb"(?:%s)?\s*\[" % _BYTE_ORDER_MARK)
_JSON = json.JSONDecoder()
"""Reads what orjson does not: NaN, and lone surrogates, which do no harm outside the text."""
_SPACE = re.compile(r"\s*")
# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


class Line(NamedTuple):
    """A line without its line end, or a whole file. Beyond MAX_RECORD_BYTES `content` may be a beginning."""

    offset: int
    content: bytes
    size: int


def text_records(stream: Stream, kind: str, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records that begin in the bytes [start, stop) of a file; of a `kind` that is not read by lines all of them.

    Where the stream is damaged, the incomplete last record is rejected with the fault as reason.
    """
    if kind == "json_array":
        return _array_records(stream, keys)
    if kind == "json_objects":
        return _object_records(stream, keys)
    if kind in ("csv", "tsv"):
        return _csv_records(stream, keys, kind)
    return _line_records(stream, start, stop, keys, kind)


def _line_records(stream: Stream, start: int, stop: int, keys: Keys, kind: str) -> Iterator[Record]:
    incomplete: Line | None = None
    end = b"\r" if kind == "text_cr" else b"\n"
    found = lines(stream, start, stop, end)
    if keys.document == "file":
        found = _whole_file(stream, start)
    # A record of one string under a key is by far the most frequent, and has a short way.
    is_plain = kind == "jsonl" and keys.prompt is None and keys.chat is None
    for line in found:
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            incomplete = line
            continue
        # A file that others were appended to has a byte-order mark in its middle, too.
        content = line.content.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r")
        if line.size > MAX_RECORD_BYTES:
            yield Rejected(line.offset, "too_large", content[:EXCERPT_BYTES])
            continue
        if not content or content.isspace():
            continue
        if kind != "jsonl":
            yield record_of(line.offset, content)
            continue
        document = _plain_document(content, keys.text) if is_plain else None
        if document is not None:
            yield document
        else:
            yield from _json_records(line.offset, content, keys)
    if not stream.read_at(stop, 1) and stream.fault:
        if incomplete is None:
            yield Rejected(stop, stream.fault, b"")
        else:
            excerpt = incomplete.content[:EXCERPT_BYTES]
            yield Rejected(incomplete.offset, stream.fault, excerpt)


def _plain_document(content: bytes, key: str) -> Document | None:
    """The document in a line that is an object of JSON with a usable text under `key`.

    None for every other line, of which `_json_records` says what it is.
    """
    try:
        text = orjson.loads(content)[key]
        utf8 = text.encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if not utf8 or text.isspace() or b"\0" in utf8 or len(utf8) > MAX_RECORD_BYTES:
        return None
    return Document(text, utf8=utf8)


def lines(stream: Stream, start: int, stop: int, end: bytes = b"\n") -> Iterator[Line]:
    """The lines that begin in [start, stop), each ended by the byte `end`."""
    offset = position = _first_line_start(stream, start, stop, end)
    parts: list[bytes] = []  # of the line at `offset`, whose end has not been read
    size = 0
    while offset < stop:
        wanted = min(_BLOCK_BYTES, stop - position) if position < stop else _BLOCK_BYTES_PAST_END
        block = stream.read_at(position, wanted)
        if not block:
            break
        position += len(block)
        ended = block.split(end)
        rest = ended.pop()
        for content in ended:
            size += len(content)
            if parts:
                content = b"".join([*parts, content])
                parts = []
            yield Line(offset, content, size)
            offset += size + 1
            size = 0
            if offset >= stop:
                return
        parts.append(rest)
        size += len(rest)
        if size > MAX_RECORD_BYTES:
            parts = [b"".join(parts)[:EXCERPT_BYTES]]
    if size:
        yield Line(offset, b"".join(parts), size)


def line_end(stream: Stream) -> bytes:
    """The byte that ends the lines of a text: a line feed, or the carriage return of old Macs and spreadsheets."""
    block = stream.read_at(0, _BLOCK_BYTES)
    return b"\r" if b"\r" in block and b"\n" not in block else b"\n"


def _first_line_start(stream: Stream, start: int, stop: int, end: bytes) -> int:
    """Where the first line that begins in [start, stop) begins; `stop` if none does."""
    if start == 0:
        return 0
    position = start - 1  # the line that contains this byte belongs to the range before
    while position < stop and (
        block := stream.read_at(position, min(_BLOCK_BYTES, stop - position))
    ):
        if (found := block.find(end)) >= 0:
            return position + found + 1
        position += len(block)
    return stop


def _whole_file(stream: Stream, start: int) -> Iterator[Line]:
    content = _beginning(stream, MAX_RECORD_BYTES)
    yield Line(start, content.replace(b"\r\n", b"\n").rstrip(b"\n"), len(content))


def _beginning(stream: Stream, most: int) -> bytes:
    """The content of `stream`, or a little more than `most` bytes of it."""
    content = bytearray()
    while len(content) <= most and (block := stream.read_at(len(content), _BLOCK_BYTES)):
        content += block
    return bytes(content)


def _json_records(offset: int, content: bytes, keys: Keys) -> Iterator[Record]:
    """The record in a line of JSON, or in each of several objects on it; of a chat one for each answer."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        yield from _other_json_records(offset, content, keys, str(error))
    else:
        yield from _records_in(offset, value, keys, content[:EXCERPT_BYTES])


def _other_json_records(offset: int, content: bytes, keys: Keys, reason: str) -> Iterator[Record]:
    """The records of what orjson does not read, for the `reason` that it gives."""
    excerpt = content[:EXCERPT_BYTES]
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield Rejected(offset, "invalid_utf8", excerpt)
        return
    values: list[object] = []
    position = _end_of_space(text, 0)
    try:
        while position < len(text):
            value, position = _JSON.raw_decode(text, position)
            values.append(value)
            position = _end_of_space(text, position)
    except (ValueError, RecursionError):
        yield Rejected(offset, "malformed_json", excerpt, reason)
        return
    if len(values) > 1 and not all(isinstance(value, dict) for value in values):
        yield Rejected(offset, "malformed_json", excerpt, reason)
        return
    for value in values:
        yield from _records_in(offset, value, keys, excerpt)


def _end_of_space(text: str, position: int) -> int:
    """Where white space at `position` ends."""
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def _records_in(offset: int, value: object, keys: Keys, excerpt: bytes = b"") -> Iterator[Record]:
    if not isinstance(value, dict):
        shown = excerpt or repr(value)[:EXCERPT_BYTES].encode(errors="replace")
        yield Rejected(
            offset, "not_an_object", shown, f"found {type(value).__name__}, expected an object"
        )
        return
    found: list[object] = []
    for key, reason in zip(keys.all, ("no_text_key", "no_prompt_key"), strict=False):
        try:
            found.append(value_at(value, key))
        except KeyError:
            names = f"its keys: {', '.join(islice(value, _SHOWN_KEYS))}".encode(
                errors="backslashreplace"
            )
            yield Rejected(offset, cast("Reason", reason), names[:EXCERPT_BYTES])
            return
    if keys.chat is not None:
        yield from keys.chat.records(offset, found[0])
    else:
        yield record_of(offset, *found)


# --- Files that only make sense from their beginning -----------------------------------------------------------------


def begins_array(stream: Stream, *, named_lines: bool = False) -> bool:
    """Whether a file of JSON is an array of all its records.

    `named_lines`: its name says that each line is JSON, so that lines which are arrays by themselves are no such array.
    """
    block = stream.read_at(0, _BLOCK_BYTES)
    if _ARRAY_START.match(block) is None:
        return False
    first, _, rest = block.removeprefix(_BYTE_ORDER_MARK).lstrip().partition(b"\n")
    return not named_lines or not rest.strip() or not _is_json(first)


def begins_objects(stream: Stream) -> bool:
    """Whether a file holds objects of JSON that are not one a line: indented, or all behind each other."""
    block = stream.read_at(0, _BLOCK_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    first, line_feed, _ = block.partition(b"\n")
    if not block.startswith(b"{") or _is_json(first):
        return False
    text = block.decode(errors="replace")
    try:
        value, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (not line_feed or "\n" in text[:end])


def _is_json(content: bytes) -> bool:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def _array_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of the array that `stream` holds, which is read whole; offsets are their numbers."""
    content = _beginning(stream, sys.maxsize).removeprefix(_BYTE_ORDER_MARK)
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        try:
            values = _JSON.decode(content.decode().strip())
        except (ValueError, RecursionError):
            what = (
                "truncated or damaged, and an array cannot be read in part"
                if stream.fault
                else "not JSON"
            )
            raise DataError(
                f"{stream.path}: {what} ({error}); correct it, or write it as JSONL, an object a line"
            ) from None
    for number, value in enumerate(values):
        yield from _records_in(number, value, keys)


def _object_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of objects that follow each other, which are read whole; offsets are their numbers.

    Behind one that is malformed the next is looked for at a line that begins with a brace.
    """
    text = _beginning(stream, sys.maxsize).decode(errors="surrogateescape")
    text = text.replace("\ufeff{", "{")  # of files that were joined
    number = 0
    position = _end_of_space(text, 0)
    while position < len(text):
        try:
            value, end = _JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            excerpt = text[position : position + EXCERPT_BYTES].encode(errors="surrogateescape")[
                :EXCERPT_BYTES
            ]
            following = text.find("\n{", position + 1)
            if following < 0 and stream.fault is not None:  # what a damaged file ends with
                yield Rejected(number, stream.fault, excerpt)
                return
            yield Rejected(number, "malformed_json", excerpt, str(error))
            end = len(text) if following < 0 else following
        else:
            yield from _records_in(number, value, keys)
        number += 1
        position = _end_of_space(text, end)
    if stream.fault:
        yield Rejected(number, stream.fault, b"")


def _csv_records(stream: Stream, keys: Keys, kind: str) -> Iterator[Record]:
    """The records of a table whose first row names the columns; offsets are row numbers.

    Raises DataError where the columns are not those of `keys`, or a quotation mark is not closed.
    """
    csv.field_size_limit(MAX_RECORD_BYTES)
    quoting = keys.quoting or _QUOTING[kind]
    texts = (
        line.content.removeprefix(_BYTE_ORDER_MARK).decode(errors="surrogateescape") + "\n"
        for line in lines(stream, 0, sys.maxsize, line_end(stream))
        if not stream.fault
        or stream.read_at(
            line.offset + line.size, 1
        )  # the last line of a damaged file is not whole
    )
    first = next(texts, "")
    delimiter = _delimiter(first, keys, kind)
    style: Literal[0, 3] = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
    rows = _rows(csv.reader(chain([first], texts), delimiter=delimiter, quoting=style, strict=True))
    names = next(rows, _Row([], 1)).cells
    if isinstance(names, csv.Error):
        raise DataError(f"{stream.path}: its first row does not name columns ({names}); correct it")
    if missing := missing_column(names, keys):
        raise DataError(f"{stream.path}: {encoding_advice([stream.path]) or missing}")
    for key in keys.all:
        if names.count(key) > 1:
            raise _twice(stream.path, key)
    places = [names.index(key) for key in keys.all]
    number = -1
    for number, (cells, taken) in enumerate(
        row for row in rows if row.cells
    ):  # without empty lines
        if isinstance(cells, csv.Error):
            if str(cells) == _UNCLOSED and taken > 1 and not stream.fault:
                raise DataError(
                    f"{stream.path}: row {number + 1}: a quotation mark is not closed, and {taken} lines follow it; "
                    "close or double it, or set `quoting: none` for the corpus (--quoting none) if a row is a line "
                    "and quotation marks are ordinary characters"
                )
            yield from taken * [Rejected(number, "malformed_csv", str(cells).encode())]
        elif len(cells) != len(names):
            yield from taken * [
                Rejected(
                    number, "malformed_csv", f"{len(cells)} columns, not {len(names)}".encode()
                )
            ]
        elif taken >= _MANY_LINES and _holds_rows(cells, delimiter):
            shown = f"a quoted field of {taken} lines that look like rows: a stray quotation mark?".encode()
            yield from taken * [Rejected(number, "malformed_csv", shown)]
        else:
            yield record_of(
                number, *(cells[place].encode(errors="surrogateescape") for place in places)
            )
    if stream.fault:
        yield Rejected(number + 1, stream.fault, b"")


def _delimiter(first: str, keys: Keys, kind: str) -> str:
    """What separates the cells of a table: that of its `kind`, or of a CSV what separates the keys in its first row."""
    if kind == "tsv":
        return "\t"
    names = first.strip().replace('"', "")
    fitting = (one for one in ",;\t|" if {*keys.all} <= {*names.split(one)})
    return next(fitting, ",")


def _twice(path: InputPath, key: str) -> DataError:
    return DataError(f"{path}: has several columns {key!r}; rename all but one")


def _holds_rows(cells: list[str], delimiter: str) -> bool:
    """Whether most lines within a cell of a row have as many delimiters as a row."""
    longest = max(cells, key=lambda cell: cell.count("\n"))
    inner = longest.split("\n")[1:-1]
    expected = len(cells) - 1
    alike = sum(line.count(delimiter) >= expected > 0 for line in inner)
    return alike >= _LOOKING_LIKE_ROWS * len(inner)


class _Row(NamedTuple):
    """A row of a table, or what is wrong with it; `lines` of the file were taken for it."""

    cells: list[str] | csv.Error
    lines: int


def _rows(reader: Any) -> Iterator[_Row]:  # csv names no type of its reader
    """The rows of a table."""
    before = 0
    while True:
        cells: list[str] | csv.Error
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cells = error
        yield _Row(cells, max(1, reader.line_num - before))
        before = reader.line_num


# --- Parquet and Arrow: a range [start, stop) counts row groups, or record batches -----------------------------------


def parquet_ranges(path: InputPath, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits a table into ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises DataError where the file is damaged, or lacks a column of `keys`.
    """
    with _faults(path, "Parquet"):
        file = _parquet(path, keys)
        paths = [file.schema.column(at).path for at in range(len(file.schema))]
        leaves = [
            at
            for at, leaf in enumerate(paths)
            if any(f"{leaf}.".startswith(f"{key}.") for key in keys.all)
        ]
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        sizes = [
            sum(max(0, group.column(leaf).total_uncompressed_size) for leaf in leaves)
            for group in groups
        ]
    return _ranges(sizes, unit_bytes)


def arrow_ranges(path: InputPath, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """The same of a file of record batches, as `datasets` saves them. Raises as `parquet_ranges`."""
    with _faults(path, "Arrow"):
        sizes = [
            sum(_column(batch, key).nbytes for key in keys.all)
            for batch in _arrow_batches(path, keys)
        ]
    return _ranges(sizes, unit_bytes)


def _ranges(sizes: list[int], unit_bytes: int) -> list[tuple[int, int, int]]:
    """Joins consecutive parts of a table until they have `unit_bytes`."""
    ranges: list[tuple[int, int, int]] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= unit_bytes or at == len(sizes) - 1:
            ranges.append((start, at + 1, total))
            start, total = at + 1, 0
    return ranges


def parquet_records(path: InputPath, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of a range; offsets are row numbers. Raises as `parquet_ranges`."""
    with _faults(path, "Parquet"):
        file = _parquet(path, keys)
        first = sum(file.metadata.row_group(group).num_rows for group in range(start))
        names, groups = [*{*keys.all}], range(start, stop)
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=names, use_threads=False):
            yield from _batch_records(batch, first, keys)
            first += batch.num_rows


def arrow_records(path: InputPath, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The same of a file of record batches."""
    first = 0
    with _faults(path, "Arrow"):
        for number, batch in enumerate(islice(_arrow_batches(path, keys), stop)):
            for row in range(0, batch.num_rows if number >= start else 0, _ROWS):
                yield from _batch_records(batch.slice(row, _ROWS), first + row, keys)
            first += batch.num_rows


def _batch_records(batch: Any, first: int, keys: Keys) -> Iterator[Record]:
    """The records of some rows, the first of which is number `first`."""
    columns = [_values(_column(batch, key)) for key in keys.all]
    for row, values in enumerate(zip(*columns, strict=True), first):
        if keys.chat is None:
            yield record_of(row, *values)
        else:
            yield from keys.chat.records(row, values[0])


def _faults(path: InputPath, kind: str) -> AbstractContextManager[None]:
    """Damaged files make pyarrow raise errors of many types."""
    return faults_of_library(
        f"{path}: damaged or not a complete {kind} file, copy it again", DataError
    )


def _parquet(path: InputPath, keys: Keys) -> Any:  # pyarrow has no type hints
    if isinstance(path, RemoteFile):
        # The parts of a group of rows are fetched together, because each request takes long.
        opened = path.open()
        file = pq.ParquetFile(opened, pre_buffer=True, page_checksum_verification=True)
    else:
        file = pq.ParquetFile(
            path, memory_map=True, pre_buffer=False, page_checksum_verification=True
        )
    _check_columns(path, file.schema_arrow, keys)
    return file


def _arrow_batches(path: InputPath, keys: Keys) -> Iterator[Any]:
    """The record batches of a file in Arrow's format for files, or for streams, which `datasets` writes."""
    if isinstance(path, RemoteFile):
        source = pa.PythonFile(path.open(), mode="r")
    else:
        source = pa.memory_map(str(path))
    if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
        file = pa.ipc.open_file(source)
        _check_columns(path, file.schema, keys)
        yield from map(file.get_batch, range(file.num_record_batches))
        return
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    _check_columns(path, stream.schema, keys)
    yield from stream


def _check_columns(path: InputPath, schema: Any, keys: Keys) -> None:
    """Raises DataError where a table lacks a column of `keys`, or has several, or one without text."""
    for key in keys.all:
        if schema.names.count(key) > 1:
            raise _twice(path, key)
        found = _type_at(schema, key)
        if found is None:
            raise DataError(f"{path}: {missing_column(schema.names, keys)}")
        found = found.value_type if pa.types.is_dictionary(found) else found
        if keys.chat is None and found not in _BYTES_OF:
            raise DataError(
                f"{path}: expected strings in the column {key!r}, found {found}; name another column"
            )


def _type_at(schema: Any, key: str) -> Any:
    """The type of a column, or of what a path of names such as `meta.body` leads to; None where there is none."""
    if key in schema.names:
        return schema.field(key).type
    first, *rest = key.split(".")
    if first not in schema.names:
        return None
    found = schema.field(first).type
    for name in rest:
        at = found.get_field_index(name) if pa.types.is_struct(found) else -1
        if at < 0:
            return None
        found = found.field(at).type
    return found


def _column(batch: Any, key: str) -> Any:
    """The column of a batch that a key, or a path of names, leads to."""
    if key in batch.schema.names:
        return batch.column(key)
    first, *rest = key.split(".")
    column = batch.column(first)
    for name in rest:
        column = pc.struct_field(column, name)
    return column


def _values(column: pa.Array) -> list[Any]:
    """The values of a column, whose offsets lie within its data; text as bytes."""
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type in _BYTES_OF:
        column = column.view(_BYTES_OF[column.type])
    column.validate(full=True)
    return list(column.to_pylist())
