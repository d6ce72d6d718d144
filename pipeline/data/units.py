"""Units of work: ranges of the input files, small enough that a crash loses little.

Which units there are depends on the files and on the unit size alone, never on who works on them.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pipeline.data import tables
from pipeline.data.records import Keys, Record
from pipeline.data.text_files import Stream, line_records, open_stream, text_length
from pipeline.errors import DataError

Kind = Literal["jsonl", "text", "parquet", "arrow"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".zst", ".xz")
_UNITS_PER_CORPUS = 64
_SMALLEST_UNIT, _LARGEST_UNIT = 4 * 2**20, 64 * 2**20


@dataclass(frozen=True)
class Unit:
    """A range [start, stop) of a file: bytes of text, row groups or record batches. `text_bytes` is about its size."""

    name: str
    path: str
    kind: Kind
    start: int
    stop: int
    text_bytes: int


def input_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` name: files, patterns (`data/*.jsonl.zst`, sorted), and folders saved by `datasets`.

    Raises:
        DataError: something is missing, empty, named twice, or of a format that is not read.
    """
    found: list[Path] = []
    for name in inputs:
        matches = [Path(name)] if Path(name).exists() else _matching(name)
        if not matches:
            raise DataError(f"{name}: no such file, and no file matches it as a pattern")
        for match in matches:
            found += tables.saved_dataset_files(match) if match.is_dir() else [match]
    for file in found:
        file_kind(file)
        if file.stat().st_size == 0:
            raise DataError(f"{file}: is empty; leave it out or put documents in it")
    if doubled := sorted({str(file) for file in found if found.count(file) > 1}):
        raise DataError(f"{doubled[0]}: is named twice among the inputs")
    return found


def default_unit_bytes(files: Sequence[Path]) -> int:
    """A unit size that gives small inputs to several workers and large ones not too many shards."""
    total = sum(file.stat().st_size for file in files)
    return min(max(total // _UNITS_PER_CORPUS, _SMALLEST_UNIT), _LARGEST_UNIT)


def _matching(pattern: str) -> list[Path]:
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207  # Path.glob: no absolute ones


def file_kind(path: Path) -> Kind:
    """What a file holds, by its name.

    Raises:
        DataError: its name ends in none of the known ways.
    """
    suffixes = path.suffixes
    compressed = bool(suffixes) and suffixes[-1] in _COMPRESSIONS
    suffix = "".join(suffixes[-2:-1] if compressed else suffixes[-1:])
    kind = _KINDS.get(suffix)
    if kind is None or (compressed and kind in ("parquet", "arrow")):
        known = ", ".join(_KINDS)
        raise DataError(
            f"{path}: unknown format; expected a name ending in {known}, the text ones also in .gz, .zst, .xz"
        )
    return kind


def split_file(path: Path, file_index: int, keys: Keys, unit_bytes: int) -> list[Unit]:
    """The units of one file, in its order. A compressed file is read once for its length.

    Raises:
        DataError: a Parquet or Arrow file is damaged or lacks a column of `keys`, or lines of text should have prompts.
    """
    kind = file_kind(path)
    if kind == "parquet":
        ranges = tables.parquet_ranges(path, keys, unit_bytes)
    elif kind == "arrow":
        ranges = tables.arrow_ranges(path, keys, unit_bytes)
    elif kind == "text" and keys.prompt is not None:
        raise DataError(
            f"{path}: a line of text has no {keys.prompt!r}; texts behind prompts come as JSONL, Parquet or Arrow"
        )
    else:
        length = text_length(path)
        starts = range(0, max(length, 1), unit_bytes)
        ranges = [(at, min(at + unit_bytes, length), min(unit_bytes, length - at)) for at in starts]
    return [
        Unit(f"{file_index:05d}-{number:06d}", str(path), kind, start, stop, size)
        for number, (start, stop, size) in enumerate(ranges)
    ]


def unit_records(unit: Unit, keys: Keys) -> Iterator[Record]:
    """The records of a unit."""
    path = Path(unit.path)
    if unit.kind == "parquet":
        return tables.parquet_records(path, unit.start, unit.stop, keys)
    if unit.kind == "arrow":
        return tables.arrow_records(path, unit.start, unit.stop, keys)
    return line_records(_kept_stream(path), unit.start, unit.stop, keys=keys if unit.kind == "jsonl" else None)


@lru_cache(maxsize=1)
def _kept_stream(path: Path) -> Stream:
    """The stream of the last file: the next unit of a compressed one then goes on where the last ended."""
    return open_stream(path)
