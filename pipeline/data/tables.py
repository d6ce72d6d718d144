"""Reading Parquet files, and the Arrow files of folders saved by `datasets`.

A range [start, stop) counts row groups in a Parquet file and record batches in an Arrow file. Whatever pyarrow raises
for a damaged file becomes a DataError that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.records import Keys, Record, missing_column, row_record
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_object

# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

Range = tuple[int, int, int]


def parquet_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits a Parquet file into row-group ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged, or lacks a column of `keys`.
    """
    with _faults(path):
        file = _open_parquet(path, keys)
        leaves = [at for at in range(len(file.schema)) if file.schema.column(at).path in keys.all]
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        # Of a dictionary's texts each counts once.
        sizes = [sum(max(0, group.column(at).total_uncompressed_size) for at in leaves) for group in groups]
    return _grouped(sizes, unit_bytes)


def parquet_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the row groups [start, stop); offsets are row numbers. Raises as `parquet_ranges`."""
    with _faults(path):
        file = _open_parquet(path, keys)
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        groups = list(range(start, stop))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=keys.all, use_threads=False):
            yield from _batch_records(batch, row, keys)
            row += batch.num_rows


def arrow_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits an Arrow stream file into record-batch ranges of about `unit_bytes`. Raises as `parquet_ranges`."""
    sizes = [sum(batch.column(key).nbytes for key in keys.all) for batch in _arrow_batches(path, keys)]
    return _grouped(sizes, unit_bytes)


def arrow_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the record batches [start, stop); offsets are row numbers. Raises as `parquet_ranges`."""
    row = 0
    for number, batch in enumerate(_arrow_batches(path, keys)):
        if number >= stop:
            return
        with _faults(path):
            for at in range(0, batch.num_rows if number >= start else 0, _ROWS):
                yield from _batch_records(batch.slice(at, _ROWS), row + at, keys)
        row += batch.num_rows


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder saved by `datasets`, in its order; with several splits, those of all.

    Raises:
        DataError: the folder was not saved by `datasets`, is damaged, or names a file outside of it.
    """
    with faults_of_library(f"{folder}: not a folder as `datasets` saves it; save it again", DataError):
        several = folder / "dataset_dict.json"
        parts = [folder / name for name in read_object(several, DataError)["splits"]] if several.exists() else [folder]
        if not all((part / "state.json").exists() for part in parts):
            raise DataError(
                f"{folder}: a folder without state.json was not saved by `datasets`; "
                f"give its files by a pattern, such as '{folder}/*.txt'"
            )
        states = [read_object(part / "state.json", DataError) for part in parts]
        files = [
            part / file["filename"] for part, state in zip(parts, states, strict=True) for file in state["_data_files"]
        ]
    if outside := [file for file in files if not file.resolve().is_relative_to(folder.resolve())]:
        raise DataError(f"{folder}: expected files of this folder, found {outside[0]}; save the dataset again")
    return files


def _batch_records(batch: Any, row: int, keys: Keys) -> Iterator[Record]:  # noqa: ANN401  # pyarrow has no type hints
    """The records of a batch of few rows, whose first is the row `row` of the file."""
    columns = [_checked_bytes(batch.column(key)).to_pylist() for key in keys.all]
    for number, values in enumerate(zip(*columns, strict=True), row):
        yield row_record(number, values)


def _checked_bytes(column: pa.Array) -> pa.Array:
    """A column of text as one of bytes, whose offsets lie within its data."""
    if pa.types.is_dictionary(column.type):
        values = _checked_bytes(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values, safe=True).dictionary_decode()
    as_bytes = column.view(_BYTES_OF[column.type])
    as_bytes.validate(full=True)
    return as_bytes


def _faults(path: Path) -> AbstractContextManager[None]:
    """Damaged files make pyarrow raise errors of many types."""
    return faults_of_library(f"{path}: damaged or not a complete {path.suffix} file, copy it again", DataError)


def _open_parquet(path: Path, keys: Keys) -> Any:  # noqa: ANN401
    file = pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
    _require_columns(path, file.schema_arrow, keys)
    return file


def _arrow_batches(path: Path, keys: Keys) -> Iterator[Any]:
    with _faults(path):
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        _require_columns(path, reader.schema, keys)
        for batch in reader:
            batch.validate()
            yield batch


def _require_columns(path: Path, schema: pa.Schema, keys: Keys) -> None:
    if missing := missing_column(schema.names, keys):
        raise DataError(f"{path}: {missing}")
    for key in keys.all:
        if schema.names.count(key) > 1:
            raise DataError(f"{path}: has several columns {key!r}; rename all but one")
        found = schema.field(key).type
        if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
            raise DataError(f"{path}: expected strings in the column {key!r}, found {found}; name another column")


def _grouped(sizes: list[int], unit_bytes: int) -> list[Range]:
    ranges: list[Range] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= unit_bytes or at == len(sizes) - 1:
            ranges.append((start, at + 1, total))
            start, total = at + 1, 0
    return ranges
