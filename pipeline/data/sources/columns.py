"""The records of tables in Parquet and Arrow: a range [start, stop) counts row groups, or record
batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import log
from pipeline.data.sources.object_stores import InputPath, RemoteFile
from pipeline.data.sources.records import (
    ChatFormat,
    Keys,
    Record,
    missing_column,
    record_of,
    repeated_column,
)
from pipeline.errors import DataError, faults_of_library

_logger = log.get_logger(__name__)
_ARROW_FILE = b"ARROW1"
# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def parquet_ranges(path: InputPath, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits a table into ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged, or lacks a column of `keys`.
    """
    with _faults(path, "Parquet"):
        file = _parquet(path)
        if _has_no_values(file, keys):
            _say_empty(path, keys)
            return []
        _check_columns(path, file.schema_arrow, keys)
        leaves = _leaves_of(file, keys)
        sizes: list[int] = []
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            size = 0
            for leaf in leaves:
                # A damaged file may say less than nothing.
                size += max(0, group.column(leaf).total_uncompressed_size)
            sizes.append(size)
    return _ranges(sizes, unit_bytes)


def _has_no_values(file: Any, keys: Keys) -> bool:
    """Whether a table has no rows, or nothing but nulls in the column of its texts.

    Such shards come of a split by language or by date. pandas gives such a column any type.
    """
    found = _type_at(file.schema_arrow, keys.text)
    if file.metadata.num_rows == 0 or (found is not None and pa.types.is_null(found)):
        return True
    leaves = [number for number in range(len(file.schema)) if _is_below(file, number, keys.text)]
    if len(leaves) != 1:
        # There is no such column, or it holds chats.
        return False
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        statistics = group.column(leaves[0]).statistics
        is_known = statistics is not None and statistics.has_null_count
        if group.num_rows and not (is_known and statistics.null_count == group.num_rows):
            return False
    return True


def _is_below(file: Any, leaf: int, key: str) -> bool:
    """Whether a leaf column is the column of a key, or part of it."""
    # The dot keeps `text` apart from `text_2`.
    return f"{file.schema.column(leaf).path}.".startswith(f"{key}.")


def _is_null(batch: Any, key: str) -> bool:
    """Whether a batch has nothing but nulls under a key."""
    if _type_at(batch.schema, key) is None:
        return False
    return bool(_column(batch, key).null_count == batch.num_rows)


def _say_empty(path: InputPath, keys: Keys) -> None:
    _logger.warning("%s: has no text under %s: it gives no document", path, keys.text)


def _leaves_of(file: Any, keys: Keys) -> list[int]:
    """The numbers of the leaf columns that hold what `keys` name.

    Parquet stores only leaves. A column of lists or structs, such as a chat, is several of them.
    """
    leaves: list[int] = []
    for number in range(len(file.schema)):
        if any(_is_below(file, number, key) for key in keys.all):
            leaves.append(number)
    return leaves


def arrow_ranges(path: InputPath, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits a file of record batches, as `datasets` saves them. Like `parquet_ranges`."""
    sizes: list[int] = []
    values = 0
    with _faults(path, "Arrow"):
        for batch in _arrow_batches(path):
            if not batch.num_rows or _is_null(batch, keys.text):
                sizes.append(0)
                continue
            _check_columns(path, batch.schema, keys)
            sizes.append(sum(_column(batch, key).nbytes for key in keys.all))
            values += batch.num_rows
    if not values:
        _say_empty(path, keys)
        return []
    return _ranges(sizes, unit_bytes)


def _ranges(sizes: list[int], unit_bytes: int) -> list[tuple[int, int, int]]:
    """Joins consecutive parts of a table until they have `unit_bytes`."""
    ranges: list[tuple[int, int, int]] = []
    start = 0
    total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= unit_bytes or at == len(sizes) - 1:
            ranges.append((start, at + 1, total))
            start = at + 1
            total = 0
    return ranges


def parquet_records(path: InputPath, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of a range; offsets are row numbers.

    Raises:
        DataError: where the file is damaged, or lacks a column of `keys`.
    """
    with _faults(path, "Parquet"):
        file = _parquet(path)
        _check_columns(path, file.schema_arrow, keys)
        first = sum(file.metadata.row_group(group).num_rows for group in range(start))
        # Of a chat both keys are one.
        names = [*{*keys.all}, *_columns_beside_chat(file.schema_arrow, keys)]
        groups = range(start, stop)
        # Without threads: each worker process has one core.
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=names, use_threads=False):
            yield from _batch_records(batch, first, keys)
            first += batch.num_rows


def arrow_records(path: InputPath, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of a range of record batches. Like `parquet_records`."""
    first = 0
    with _faults(path, "Arrow"):
        for number, batch in enumerate(islice(_arrow_batches(path), stop)):
            # Batches before the range are only counted: a stream has no index of its batches.
            if number >= start:
                for row in range(0, batch.num_rows, _ROWS):
                    yield from _batch_records(batch.slice(row, _ROWS), first + row, keys)
            first += batch.num_rows


def _batch_records(batch: Any, first: int, keys: Keys) -> Iterator[Record]:
    """The records of some rows, the first of which is number `first`."""
    if keys.chat is not None:
        yield from _chat_records(batch, first, keys, keys.chat)
        return
    columns = [_values(_column(batch, key)) for key in keys.all]
    for row, values in enumerate(zip(*columns, strict=True), first):
        yield record_of(row, *values)


def _chat_records(batch: Any, first: int, keys: Keys, chat: ChatFormat) -> Iterator[Record]:
    """The records of some rows that hold chats."""
    chats = _values(_column(batch, keys.text))
    beside: dict[str, list[Any]] = {}
    for key in _columns_beside_chat(batch.schema, keys):
        beside[key.rpartition(".")[2]] = _values(_column(batch, key))
    for row, messages in enumerate(chats):
        # A table has a column for all rows, and null where a row has no value.
        of_row = {name: values[row] for name, values in beside.items() if values[row] is not None}
        yield from chat.records(first + row, messages, of_row)


def _columns_beside_chat(schema: Any, keys: Keys) -> list[str]:
    """The columns of a table that are read beside that of its chats."""
    return [key for key in keys.beside_chat if _type_at(schema, key) is not None]


def _faults(path: InputPath, kind: str) -> AbstractContextManager[None]:
    """Damaged files make pyarrow raise errors of many types."""
    return faults_of_library(
        f"{path}: damaged or not a complete {kind} file, copy it again", DataError
    )


def _parquet(path: InputPath) -> Any:  # pyarrow has no type hints
    if isinstance(path, RemoteFile):
        # The parts of a group of rows are fetched together, because each request takes long.
        opened = path.open()
        return pq.ParquetFile(opened, pre_buffer=True, page_checksum_verification=True)
    return pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)


def _arrow_batches(path: InputPath) -> Iterator[Any]:
    """The record batches of a file in Arrow's format for files, or for streams, which `datasets`
    writes."""
    if isinstance(path, RemoteFile):
        source = pa.PythonFile(path.open(), mode="r")
    else:
        source = pa.memory_map(str(path))
    if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
        file = pa.ipc.open_file(source)
        yield from map(file.get_batch, range(file.num_record_batches))
        return
    source.seek(0)
    yield from pa.ipc.open_stream(source)


def _check_columns(path: InputPath, schema: Any, keys: Keys) -> None:
    """Compares the columns of a table with `keys`.

    Raises:
        DataError: a column is missing, repeated, or without text.
    """
    for key in keys.all:
        if schema.names.count(key) > 1:
            raise DataError(repeated_column(path, key))
        found = _type_at(schema, key)
        if found is None:
            raise DataError(f"{path}: {missing_column(schema.names, keys)}")
        if pa.types.is_dictionary(found):
            found = found.value_type
        if keys.chat is None and found not in _BYTES_OF:
            raise DataError(
                f"{path}: expected strings in the column {key!r}, found {found}; "
                "name another column"
            )


def _type_at(schema: Any, key: str) -> Any:
    """The type of a column, or of what a path of names such as `meta.body` leads to; None where
    there is none."""
    if key in schema.names:
        return schema.field(key).type
    first, *rest = key.split(".")
    if first not in schema.names:
        return None
    found = schema.field(first).type
    for name in rest:
        if not pa.types.is_struct(found):
            return None
        at = found.get_field_index(name)
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
        # Decoding follows the indices, so they are checked first: a stranger's file could read
        # outside its memory.
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type in _BYTES_OF:
        column = column.view(_BYTES_OF[column.type])
    column.validate(full=True)
    return list(column.to_pylist())
