"""Reading Parquet files, and the Arrow files of folders saved by `datasets`.

A range [start, stop) counts row groups in a Parquet file and record batches in an Arrow file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    Document,
    Keys,
    Record,
    Rejected,
    checked_text,
    with_prompt,
)
from pipeline.errors import DataError

# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256


def parquet_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits a Parquet file into row-group ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged or lacks a column of `keys`.
    """
    with _open_parquet(path) as file:
        _require_columns(path, file.schema_arrow.names, keys)
        leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] == keys.text)
        groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
        sizes = [group.column(leaf).total_uncompressed_size for group in groups]
    return _grouped(sizes, unit_bytes)


def parquet_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the row groups [start, stop); offsets are row numbers in the file."""
    with _open_parquet(path) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        groups = list(range(start, stop))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=keys.all, use_threads=False):
            yield from _records([batch.column(key) for key in keys.all], row)
            row += batch.num_rows


def arrow_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Splits an Arrow stream file into record-batch ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged or lacks a column of `keys`.
    """
    with _open_arrow(path) as batches:
        _require_columns(path, batches.schema.names, keys)
        sizes = [int(batch.column(keys.text).nbytes) for batch in batches]
    return _grouped(sizes, unit_bytes)


def arrow_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the record batches [start, stop); offsets are row numbers in the file."""
    row = 0
    with _open_arrow(path) as batches:
        for number, batch in enumerate(batches):
            if number >= stop:
                return
            if number >= start:
                for at in range(0, batch.num_rows, _ROWS):
                    yield from _records([batch.column(key).slice(at, _ROWS) for key in keys.all], row + at)
            row += batch.num_rows


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder saved by `datasets`, in its order; with several splits, those of all.

    Raises:
        DataError: the folder was not saved by `datasets`.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = orjson.loads(splits.read_bytes())["splits"]
        return [file for name in names for file in saved_dataset_files(folder / name)]
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(
            f"{folder}: a folder without state.json was not saved by `datasets`; give its files by a pattern"
        )
    return [folder / Path(file["filename"]).name for file in orjson.loads(state.read_bytes())["_data_files"]]


def _records(columns: Sequence[pa.Array], first_row: int) -> Iterator[Record]:
    """The records of a column of texts, or of one of answers and one of prompts."""
    if len(columns) == 1:
        yield from _column_records(columns[0], first_row)
        return
    pairs = zip(*(_column_records(column, first_row) for column in columns), strict=True)
    for row, (answer, prompt) in enumerate(pairs, start=first_row):
        yield with_prompt(row, answer, prompt.text if isinstance(prompt, Document) else None)


def _column_records(column: pa.Array, first_row: int) -> Iterator[Record]:
    is_large = pa.types.is_large_string(column.type)
    is_text = is_large or pa.types.is_string(column.type)
    if is_text:  # as bytes: one value that is not UTF-8 must not make the others unreadable
        column = column.cast(pa.large_binary() if is_large else pa.binary())
    for row, value in enumerate(column, start=first_row):
        yield _text_record(row, value.as_py()) if is_text else checked_text(row, value.as_py())


def _text_record(row: int, value: bytes | None) -> Record:
    if value is None:
        return Rejected(row, "text_not_string", b"null")
    if len(value) > MAX_RECORD_BYTES:
        return Rejected(row, "too_large", value[:EXCERPT_BYTES])
    try:
        return checked_text(row, value.decode())
    except UnicodeDecodeError:
        return Rejected(row, "invalid_utf8", value[:EXCERPT_BYTES])


def _open_parquet(path: Path) -> Any:  # noqa: ANN401  # pyarrow has no type hints
    try:
        return pq.ParquetFile(path, memory_map=True, pre_buffer=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a complete Parquet file: {str(error).splitlines()[0]}") from None


def _open_arrow(path: Path) -> Any:  # noqa: ANN401
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not an Arrow file of `datasets`: {str(error).splitlines()[0]}") from None


def _require_columns(path: Path, names: list[str], keys: Keys) -> None:
    for key, option in zip(keys.all, ("--text-key", "--prompt-key"), strict=False):
        if key not in names:
            raise DataError(f"{path}: has no column {key!r}; set {option} to one of: {', '.join(names)}")


def _grouped(sizes: list[int], unit_bytes: int) -> list[tuple[int, int, int]]:
    ranges: list[tuple[int, int, int]] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= unit_bytes or at == len(sizes) - 1:
            ranges.append((start, at + 1, total))
            start, total = at + 1, 0
    return ranges
