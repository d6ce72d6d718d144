"""Reading Parquet files, and the Arrow files of folders saved by `datasets`.

A range [start, stop) counts row groups in a Parquet file and rows in an Arrow file. Whatever pyarrow raises for a
damaged file becomes a DataError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.records import Keys, Record, missing_column, record_of
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_object

# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

Range = tuple[int, int, int]


def table_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits a table into ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises DataError where the file is damaged, or lacks a column of `keys`.
    """
    ranges: list[Range] = []
    start = total = 0
    with _faults(path):
        if path.suffix == ".arrow":
            table = _arrow(path, keys)
            total, rows = sum(table.column(key).nbytes for key in keys.all), table.num_rows
            step = max(1, math.ceil(rows * min(1, unit_bytes / max(1, total))))
            return [(at, min(at + step, rows), min(step, rows - at) * total // rows) for at in range(0, rows, step)]
        file = _parquet(path, keys)
        leaves = [at for at in range(len(file.schema)) if file.schema.column(at).path in keys.all]
        for at, group in enumerate(map(file.metadata.row_group, range(file.num_row_groups))):
            # Of a dictionary's texts each counts once.
            total += sum(max(0, group.column(leaf).total_uncompressed_size) for leaf in leaves)
            if total >= unit_bytes or at == file.num_row_groups - 1:
                ranges.append((start, at + 1, total))
                start, total = at + 1, 0
    return ranges


def table_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of a range; offsets are row numbers. Raises as `table_ranges`."""
    with _faults(path):
        if path.suffix == ".arrow":
            first, batches = start, _arrow(path, keys).slice(start, stop - start).to_batches(max_chunksize=_ROWS)
        else:
            file = _parquet(path, keys)
            first = sum(file.metadata.row_group(group).num_rows for group in range(start))
            batches = file.iter_batches(_ROWS, row_groups=range(start, stop), columns=keys.all, use_threads=False)
        for batch in batches:
            columns = [_checked_bytes(batch.column(key)).to_pylist() for key in keys.all]
            for row, values in enumerate(zip(*columns, strict=True), first):
                yield record_of(row, *values)
            first += batch.num_rows


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder saved by `datasets`, in its order; with several splits, those of all.

    Raises DataError where the folder was not saved by `datasets`, is damaged, or names a file outside of it.
    """
    with faults_of_library(f"{folder}: not a folder as `datasets` saves it; save it again", DataError):
        several = folder / "dataset_dict.json"
        parts = [folder / name for name in read_object(several, DataError)["splits"]] if several.exists() else [folder]
        if not all((part / "state.json").exists() for part in parts):
            raise DataError(
                f"{folder}: a folder without state.json was not saved by `datasets`; "
                f"give its files by a pattern, such as '{folder}/*.txt'"
            )
        states = [(part, read_object(part / "state.json", DataError)) for part in parts]
        files = [part / file["filename"] for part, state in states for file in state["_data_files"]]
    if outside := [file for file in files if not file.resolve().is_relative_to(folder.resolve())]:
        raise DataError(f"{folder}: expected files of this folder, found {outside[0]}; save the dataset again")
    return files


def _faults(path: Path) -> AbstractContextManager[None]:
    """Damaged files make pyarrow raise errors of many types."""
    return faults_of_library(f"{path}: damaged or not a complete {path.suffix} file, copy it again", DataError)


def _parquet(path: Path, keys: Keys) -> Any:  # noqa: ANN401  # pyarrow has no type hints
    file = pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
    _require_columns(path, file.schema_arrow, keys)
    return file


def _arrow(path: Path, keys: Keys) -> Any:  # noqa: ANN401
    """The table in a file, which stays on disk."""
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    _require_columns(path, table.schema, keys)
    table.validate()
    return table


def _require_columns(path: Path, schema: pa.Schema, keys: Keys) -> None:
    if missing := missing_column(schema.names, keys):
        raise DataError(f"{path}: {missing}")
    for key in keys.all:
        if schema.names.count(key) > 1:
            raise DataError(f"{path}: has several columns {key!r}; rename all but one")
        found = schema.field(key).type
        if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
            raise DataError(f"{path}: expected strings in the column {key!r}, found {found}; name another column")


def _checked_bytes(column: pa.Array) -> pa.Array:
    """A column of text as one of bytes, whose offsets lie within its data."""
    if pa.types.is_dictionary(column.type):
        values = _checked_bytes(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values, safe=True).dictionary_decode()
    as_bytes = column.view(_BYTES_OF[column.type])
    as_bytes.validate(full=True)
    return as_bytes
