"""The records of tables in CSV and TSV, which are read from their beginning."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from pipeline.data.sources.lines import BYTE_ORDER_MARK, line_end, lines
from pipeline.data.sources.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    Keys,
    Quoting,
    Record,
    Rejected,
    missing_column,
    record_of,
    repeated_column,
)
from pipeline.data.sources.stray_quotes import MANY_LINES, RowsBefore
from pipeline.data.sources.streams import Stream, encoding_advice
from pipeline.errors import DataError

DEFAULT_QUOTING: dict[str, Quoting] = {"csv": "standard", "tsv": "none"}
# What Python's csv says at the end of a file within a quoted field.
_UNCLOSED = "unexpected end of data"
# How it begins to say that a cell is longer than it may be.
_TOO_LONG = "field larger than field limit"


def csv_records(stream: Stream, keys: Keys, kind: str) -> Iterator[Record]:
    """The records of a table whose first row names the columns; offsets are row numbers.

    Raises:
        DataError: the columns are not those of `keys`, or a quotation mark is not closed.
    """
    # The limit is of the whole process. Its default of 128 KiB is less than many documents. A line
    # that is no longer than a record fits into a cell with its line feed.
    csv.field_size_limit(MAX_RECORD_BYTES + 1)
    taken = _Taken()
    texts = _text_lines(stream, taken)
    # Empty lines are no rows before the names either.
    first = next((text for text in texts if taken.is_too_large or not text.isspace()), "")
    delimiter = _delimiter(first, keys, kind)
    quoting = keys.quoting or DEFAULT_QUOTING[kind]
    style: Literal[0, 3] = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
    reader = csv.reader(chain([first], texts), delimiter=delimiter, quoting=style, strict=True)
    rows = _rows(reader, taken)
    names = _column_names(stream, next(rows, []), keys, is_too_large=taken.is_too_large)
    places = [names.index(key) for key in keys.all]

    before = RowsBefore(delimiter)
    number = -1
    for cells in rows:
        if not cells and not taken.is_too_large:
            # An empty line is no row, and has no number.
            continue
        number += 1
        fault = _fault_of(cells, len(names), taken.lines, before)
        if fault == _UNCLOSED and taken.lines > 1 and not stream.fault:
            raise DataError(
                f"{stream.path}: row {number + 1}: a quotation mark is not closed, and "
                f"{taken.lines} lines follow it; close or double it, or set `quoting: none` for "
                "the corpus (--quoting none) if a row is a line and quotation marks are ordinary "
                "characters"
            )
        if taken.is_too_large:
            yield Rejected(number, "too_large", taken.beginning, size=taken.size)
            continue
        if fault is not None or isinstance(cells, csv.Error):
            # Each line counts as a record: so a stray mark that takes many can stop the job.
            yield from taken.lines * [Rejected(number, "malformed_csv", str(fault).encode())]
            continue
        before.add(cells)
        found = [cells[place].encode(errors="surrogateescape") for place in places]
        yield record_of(number, *found)
    if stream.fault:
        yield Rejected(number + 1, stream.fault, b"")


@dataclass
class _Taken:
    """What of a file was taken for the row that is being read.

    `is_repeated`: its last line is to be read again, as one that begins within a quoted cell.
    """

    lines: int = 0
    size: int = 0
    beginning: bytes = b""
    is_too_large: bool = False
    is_repeated: bool = False


def _text_lines(stream: Stream, taken: _Taken) -> Iterator[str]:
    """The lines of a table, each with a line feed; each is added to `taken`."""
    for line in lines(stream, 0, sys.maxsize, line_end(stream)):
        # The last line of a damaged file is not whole.
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            continue
        # Bytes that are not UTF-8 come back as they were when a cell is encoded: `record_of` then
        # rejects that row alone.
        content = line.content.removeprefix(BYTE_ORDER_MARK)
        if not taken.lines:
            taken.beginning = content[:EXCERPT_BYTES]
        taken.lines += 1
        taken.size += line.size
        if line.size > MAX_RECORD_BYTES:
            # Its row is rejected. Whether the row ends with it depends on its quotation marks.
            taken.is_too_large = True
            content = b'"' * ((content.count(b'"') + line.lost_quotes) % 2)
        text = content.decode(errors="surrogateescape") + "\n"
        yield text
        if taken.is_repeated:
            taken.is_repeated = False
            yield '"' + text


def _column_names(
    stream: Stream, names: list[str] | csv.Error, keys: Keys, *, is_too_large: bool
) -> list[str]:
    """The names in the first row.

    Raises:
        DataError: the row cannot be read, is `is_too_large`, lacks a column of `keys`, or has
            several of one name.
    """
    if is_too_large:
        raise DataError(
            f"{stream.path}: expected the names of columns in its first row, found a row of more "
            f"than {MAX_RECORD_BYTES >> 20} MiB; write one with the names"
        )
    if isinstance(names, csv.Error):
        raise DataError(f"{stream.path}: its first row does not name columns ({names}); correct it")
    if any(name.strip() for name in names):
        missing = missing_column(names, keys)
    else:
        missing = (
            "expected the names of columns in its first row, found none; write a row with the "
            f"names, of which one is {keys.text!r} (--text-key)"
        )
    if missing is not None:
        raise DataError(f"{stream.path}: {encoding_advice([stream.path]) or missing}")
    for key in keys.all:
        if names.count(key) > 1:
            raise DataError(repeated_column(stream.path, key))
    return names


def _fault_of(
    cells: list[str] | csv.Error, columns: int, row_lines: int, before: RowsBefore
) -> str | None:
    """What is wrong with a row of so many lines in a table of so many columns; None for nothing."""
    if isinstance(cells, csv.Error):
        return str(cells)
    if len(cells) != columns:
        return f"{len(cells)} columns, not {columns}"
    found = before.lines_taken(cells) if row_lines >= MANY_LINES else 0
    if found:
        return f"a quoted field of {found} lines that look like rows: a stray quotation mark?"
    return None


def _delimiter(first: str, keys: Keys, kind: str) -> str:
    """What separates the cells of a table.

    In a TSV it is a tab, in a CSV what separates the keys in its first row.
    """
    if kind == "tsv":
        return "\t"
    names = first.strip().replace('"', "")
    for delimiter in ",;\t|":
        if {*keys.all} <= {*names.split(delimiter)}:
            return delimiter
    return ","


def _rows(reader: Any, taken: _Taken) -> Iterator[list[str] | csv.Error]:  # csv has no type of it
    """The rows of a table, or what is wrong with one; `taken` is what the last one took."""
    while True:
        cells: list[str] | csv.Error
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error).startswith(_TOO_LONG):
                # The cell goes on: only its end is the end of this row. csv forgets what it read.
                taken.is_too_large = taken.is_repeated = True
                continue
            cells = error
        yield cells
        taken.lines = taken.size = 0
        taken.is_too_large = False
