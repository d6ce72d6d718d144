"""Reading Parquet files, and the Arrow files of folders saved by `datasets`.

A range [start, stop) counts row groups in a Parquet file and record batches in an Arrow file.

The files may be damaged or hostile: every error of pyarrow becomes a DataError that names the file, the memory that it
takes is limited, and a small file that decodes to very much text is refused.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from pipeline.data.input_checks import open_input, refuse_bomb
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
from pipeline.files import is_plain_name, read_record

# Few rows at a time: the memory needed is that of the longest documents in one batch.
_ROWS = 256
# Room for a batch of rows and for a page of a Parquet file, which is decompressed as a whole.
_MEMORY_BYTES = 2**30
# What a row counts in the size of a decoded file, besides its text: rows without text take time too.
_ROW_BYTES = 256
# Text is read as bytes: one value that is not UTF-8 must not make the others unreadable.
_BYTES_OF: dict[pa.DataType, pa.DataType] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

_STATM = Path("/proc/self/statm")
# The limit is the whole process's, so that two threads must not set it in turns.
_one_at_a_time = threading.RLock()

Range = tuple[int, int, int]
_Answer = TypeVar("_Answer")
_FORMATS = {".parquet": "Parquet file", ".arrow": "Arrow file of `datasets`"}


def parquet_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits a Parquet file into row-group ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        DataError: the file is damaged, lacks a column of `keys`, or is a decompression bomb.
    """
    file = _open_parquet(path, keys)
    sizes = _call(path, lambda: _group_sizes(file, keys))
    if any(rows < 0 or text < 0 for rows, text in sizes):
        raise DataError(f"{path}: a row group of less than nothing; the file is damaged, copy it again")
    refuse_bomb(path, sum(rows * _ROW_BYTES + text for rows, text in sizes))
    return _grouped([text for _, text in sizes], unit_bytes)


def parquet_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the row groups [start, stop); offsets are row numbers. Raises as `parquet_ranges`."""
    file = _open_parquet(path, keys)
    row = _call(path, lambda: sum(file.metadata.row_group(group).num_rows for group in range(start)))
    groups = list(range(start, stop))
    batches = file.iter_batches(_ROWS, row_groups=groups, columns=keys.all, use_threads=False)
    yield from _batch_records(path, iter(lambda: _call(path, lambda: next(batches, None)), None), row, keys)


def arrow_ranges(path: Path, keys: Keys, unit_bytes: int) -> list[Range]:
    """Splits an Arrow stream file into record-batch ranges of about `unit_bytes` of text: (start, stop, bytes).

    Raises:
        as `parquet_ranges`.
    """
    return _grouped([_batch_bytes(batch, keys) for batch in _arrow_batches(path, keys)], unit_bytes)


def arrow_records(path: Path, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records of the record batches [start, stop); offsets are row numbers. Raises as `arrow_ranges`."""
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
    decoded = 0
    for batch in batches:
        columns = _call(path, partial(_text_columns, batch, keys))
        decoded += batch.num_rows * _ROW_BYTES + sum(column.nbytes for column in columns)
        refuse_bomb(path, decoded)
        yield from _records(columns, row)
        row += batch.num_rows


def _records(columns: Sequence[pa.Array], first_row: int) -> Iterator[Record]:
    """The records of a column of texts, or of one of answers and one of prompts."""
    if len(columns) == 1:
        yield from _column_records(columns[0], first_row)
        return
    pairs = zip(*(_column_records(column, first_row) for column in columns), strict=True)
    for row, (answer, prompt) in enumerate(pairs, start=first_row):
        yield with_prompt(row, answer, prompt.text if isinstance(prompt, Document) else None)


def _column_records(column: pa.Array, first_row: int) -> Iterator[Record]:
    for row, value in zip(count(first_row), column, strict=False):
        buffer = value.as_buffer()
        if buffer is None:
            yield Rejected(row, "text_not_string", b"null")
        elif buffer.size > MAX_RECORD_BYTES:
            yield Rejected(row, "too_large", buffer.slice(0, EXCERPT_BYTES).to_pybytes())
        else:
            yield _text_record(row, buffer.to_pybytes())


def _text_record(row: int, value: bytes) -> Record:
    try:
        return checked_text(row, value.decode())
    except UnicodeDecodeError:
        return Rejected(row, "invalid_utf8", value[:EXCERPT_BYTES])


def _text_columns(batch: Any, keys: Keys) -> list[pa.Array]:  # noqa: ANN401
    return [_checked_bytes(batch.column(key)) for key in keys.all]


def _checked_bytes(column: pa.Array) -> pa.Array:
    """A column of text as one of bytes, whose offsets lie within its data."""
    if pa.types.is_dictionary(column.type):
        values = _checked_bytes(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values, safe=True).dictionary_decode()
    as_bytes = column.view(_BYTES_OF[column.type])
    as_bytes.validate(full=True)
    return as_bytes


def _call(path: Path, function: Callable[[], _Answer]) -> _Answer:
    """What a function of pyarrow returns, within a limit on memory."""
    try:
        with _memory_limit(_MEMORY_BYTES):
            return function()
    except MemoryError:
        raise DataError(
            f"{path}: needs more than {_MEMORY_BYTES // 2**20} MiB for a page or {_ROWS} rows; write it again in "
            "smaller pages, or leave it out if it should be small: it is damaged or a decompression bomb"
        ) from None
    except Exception as error:  # noqa: BLE001  # damaged files make pyarrow raise errors of many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path}: not a complete {_FORMATS[path.suffix]}: {reason[:300]}; copy it again") from None


def _prepare(path: Path) -> None:
    open_input(path).close()
    # pyarrow's own allocator keeps what was freed, beyond the limit on memory.
    pa.set_memory_pool(pa.system_memory_pool())


def _open_parquet(path: Path, keys: Keys) -> Any:  # noqa: ANN401  # pyarrow has no type hints
    _prepare(path)
    file = _call(path, lambda: pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True))
    _require_columns(path, _call(path, lambda: file.schema_arrow), keys)
    return file


def _group_sizes(file: Any, keys: Keys) -> list[tuple[int, int]]:  # noqa: ANN401
    """Of each row group, its rows and the bytes of its texts; of a dictionary's texts each counts once."""
    leaves = [at for at in range(len(file.schema)) if file.schema.column(at).path in keys.all]
    sizes = []
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(at) for at in leaves]
        rows = max([group.num_rows, *(column.num_values for column in columns)])
        sizes.append((rows, sum(column.total_uncompressed_size for column in columns)))
    return sizes


def _arrow_batches(path: Path, keys: Keys) -> Iterator[Any]:
    _prepare(path)
    reader = _call(path, lambda: pa.ipc.open_stream(pa.memory_map(str(path))))
    _require_columns(path, reader.schema, keys)
    decoded = 0
    while (batch := _call(path, lambda: next(reader, None))) is not None:
        _call(path, batch.validate)
        decoded += batch.num_rows * _ROW_BYTES + _batch_bytes(batch, keys)
        refuse_bomb(path, decoded)
        yield batch


def _batch_bytes(batch: Any, keys: Keys) -> int:  # noqa: ANN401
    return int(sum(batch.column(key).nbytes for key in keys.all))


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


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Lets this process allocate at most about `more` bytes beyond what it has now; mapped files do not count.

    An allocation beyond that fails: in Python and pyarrow with a MemoryError.
    """
    with _one_at_a_time:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = int(_STATM.read_bytes().split()[5]) * resource.getpagesize() + more
        limits = [wanted, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
