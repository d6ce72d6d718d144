"""Reading Parquet files, and the Arrow files of folders saved by `datasets`.

A range [start, stop) counts row groups in a Parquet file and record batches in an Arrow file. Whatever pyarrow raises
for a damaged file becomes a DataError that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from pipeline.data.records import Keys, Record, row_record
from pipeline.errors import DataError, faults_of_library
from pipeline.files import is_plain_name, read_record

# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

Range = tuple[int, int, int]
_Answer = TypeVar("_Answer")


def parquet_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits a Parquet file into row-group ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged, or lacks a column of `keys`.
    """
    file = _open_parquet(path, keys)
    return _grouped(_call(path, lambda: _group_sizes(file, keys)), unit_bytes)


def parquet_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the row groups [start, stop); offsets are row numbers. Raises as `parquet_ranges`."""
    file = _open_parquet(path, keys)
    row = _call(path, lambda: sum(file.metadata.row_group(group).num_rows for group in range(start)))
    batches = file.iter_batches(_ROWS, row_groups=list(range(start, stop)), columns=keys.all, use_threads=False)
    yield from _batch_records(path, iter(lambda: _call(path, lambda: next(batches, None)), None), row, keys)


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
        if number >= start:
            slices = (batch.slice(at, _ROWS) for at in range(0, batch.num_rows, _ROWS))
            yield from _batch_records(path, slices, row, keys)
        row += batch.num_rows


class _Splits(BaseModel):
    """dataset_dict.json"""

    splits: list[str]


class _ArrowFile(BaseModel):
    filename: str


class _State(BaseModel):
    """state.json"""

    data_files: list[_ArrowFile] = Field(alias="_data_files")


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder saved by `datasets`, in its order; with several splits, those of all.

    Raises:
        DataError: the folder was not saved by `datasets`, is damaged, or names a file outside of it.
    """
    path = folder / "dataset_dict.json"
    try:
        splits = read_record(path, _Splits, DataError, "save the dataset again").splits
    except FileNotFoundError:
        return _split_files(folder)
    return [file for name in _plain(path, splits) for file in _split_files(folder / name)]


def _split_files(folder: Path) -> list[Path]:
    path = folder / "state.json"
    try:
        state = read_record(path, _State, DataError, "save the dataset again")
    except FileNotFoundError:
        raise DataError(
            f"{folder}: a folder without state.json was not saved by `datasets`; "
            f"give its files by a pattern, such as '{folder}/*.txt'"
        ) from None
    return [folder / name for name in _plain(path, [file.filename for file in state.data_files])]


def _plain(path: Path, names: list[str]) -> list[str]:
    for name in names:
        if not is_plain_name(name):
            raise DataError(f"{path}: expected names of the same folder, found {name!r}; save the dataset again")
    return names


def _batch_records(path: Path, batches: Iterable[Any], row: int, keys: Keys) -> Iterator[Record]:
    """The records of `batches`, of few rows each; the first is the row `row` of the file."""
    for batch in batches:
        columns = _call(path, partial(_text_columns, batch, keys))
        for values in zip(*columns, strict=True):
            yield row_record(row, values)
            row += 1


def _text_columns(batch: Any, keys: Keys) -> list[list[bytes | None]]:  # noqa: ANN401  # pyarrow has no type hints
    return [_checked_bytes(batch.column(key)).to_pylist() for key in keys.all]


def _checked_bytes(column: pa.Array) -> pa.Array:
    """A column of text as one of bytes, whose offsets lie within its data."""
    if pa.types.is_dictionary(column.type):
        values = _checked_bytes(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values, safe=True).dictionary_decode()
    as_bytes = column.view(_BYTES_OF[column.type])
    as_bytes.validate(full=True)
    return as_bytes


def _call(path: Path, function: Callable[[], _Answer]) -> _Answer:
    """What a function of pyarrow returns; damaged files make it raise errors of many types."""
    with faults_of_library(f"{path}: damaged or not a complete {path.suffix} file, copy it again", DataError):
        return function()


def _open_parquet(path: Path, keys: Keys) -> Any:  # noqa: ANN401
    file = _call(path, lambda: pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True))
    _require_columns(path, _call(path, lambda: file.schema_arrow), keys)
    return file


def _group_sizes(file: Any, keys: Keys) -> list[int]:  # noqa: ANN401
    """Of each row group, the bytes of its texts; of a dictionary's texts each counts once."""
    leaves = [at for at in range(len(file.schema)) if file.schema.column(at).path in keys.all]
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    return [sum(max(0, group.column(at).total_uncompressed_size) for at in leaves) for group in groups]


def _arrow_batches(path: Path, keys: Keys) -> Iterator[Any]:
    reader = _call(path, lambda: pa.ipc.open_stream(pa.memory_map(str(path))))
    _require_columns(path, reader.schema, keys)
    while (batch := _call(path, lambda: next(reader, None))) is not None:
        _call(path, batch.validate)
        yield batch


def _require_columns(path: Path, schema: pa.Schema, keys: Keys) -> None:
    for key, option in zip(keys.all, ("--text-key", "--prompt-key"), strict=False):
        if key not in schema.names:
            names = ", ".join(schema.names)[:500]
            raise DataError(f"{path}: has no column {key!r}; set {option} to one of: {names}")
        if schema.names.count(key) > 1:
            raise DataError(f"{path}: has several columns {key!r}; rename all but one")
        found = schema.field(key).type
        if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
            raise DataError(f"{path}: expected strings in the column {key!r}, found {found}; set {option} to another")


def _grouped(sizes: list[int], unit_bytes: int) -> list[Range]:
    ranges: list[Range] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= unit_bytes or at == len(sizes) - 1:
            ranges.append((start, at + 1, total))
            start, total = at + 1, 0
    return ranges
