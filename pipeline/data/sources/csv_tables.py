"""The records of tables in CSV and TSV, which are read from their beginning."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

from pipeline.data.sources.lines import BYTE_ORDER_MARK, line_end, lines
from pipeline.data.sources.records import (
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


def csv_records(stream: Stream, keys: Keys, kind: str) -> Iterator[Record]:
    """The records of a table whose first row names the columns; offsets are row numbers.

    Raises:
        DataError: the columns are not those of `keys`, or a quotation mark is not closed.
    """
    # The limit is of the whole process. Its default of 128 KiB is less than many documents.
    csv.field_size_limit(MAX_RECORD_BYTES)
    texts = _text_lines(stream)
    first = next(texts, "")
    delimiter = _delimiter(first, keys, kind)
    quoting = keys.quoting or DEFAULT_QUOTING[kind]
    style: Literal[0, 3] = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
    reader = csv.reader(chain([first], texts), delimiter=delimiter, quoting=style, strict=True)
    rows = _rows(reader)
    names = _column_names(stream, next(rows, _CsvRow([], 1)).cells, keys)
    places = [names.index(key) for key in keys.all]

    before = RowsBefore(delimiter)
    number = -1
    for row in rows:
        if not row.cells:
            # An empty line is no row, and has no number.
            continue
        number += 1
        fault = _fault_of(row, len(names), before)
        if fault == _UNCLOSED and row.lines > 1 and not stream.fault:
            raise DataError(
                f"{stream.path}: row {number + 1}: a quotation mark is not closed, and {row.lines} "
                "lines follow it; close or double it, or set `quoting: none` for the corpus "
                "(--quoting none) if a row is a line and quotation marks are ordinary characters"
            )
        if fault is not None or isinstance(row.cells, csv.Error):
            # Each line counts as a record: so a stray mark that takes many can stop the job.
            yield from row.lines * [Rejected(number, "malformed_csv", str(fault).encode())]
            continue
        before.add(row.cells)
        found = [row.cells[place].encode(errors="surrogateescape") for place in places]
        yield record_of(number, *found)
    if stream.fault:
        yield Rejected(number + 1, stream.fault, b"")


def _text_lines(stream: Stream) -> Iterator[str]:
    """The lines of a table, each with a line feed."""
    for line in lines(stream, 0, sys.maxsize, line_end(stream)):
        # The last line of a damaged file is not whole.
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            continue
        # Bytes that are not UTF-8 come back as they were when a cell is encoded: `record_of` then
        # rejects that row alone.
        content = line.content.removeprefix(BYTE_ORDER_MARK)
        yield content.decode(errors="surrogateescape") + "\n"


def _column_names(stream: Stream, names: list[str] | csv.Error, keys: Keys) -> list[str]:
    """The names in the first row.

    Raises:
        DataError: the row cannot be read, lacks a column of `keys`, or has several of one name.
    """
    if isinstance(names, csv.Error):
        raise DataError(f"{stream.path}: its first row does not name columns ({names}); correct it")
    missing = missing_column(names, keys)
    if missing is not None:
        raise DataError(f"{stream.path}: {encoding_advice([stream.path]) or missing}")
    for key in keys.all:
        if names.count(key) > 1:
            raise DataError(repeated_column(stream.path, key))
    return names


def _fault_of(row: _CsvRow, columns: int, before: RowsBefore) -> str | None:
    """What is wrong with a row of a table of so many columns; None for nothing."""
    if isinstance(row.cells, csv.Error):
        return str(row.cells)
    if len(row.cells) != columns:
        return f"{len(row.cells)} columns, not {columns}"
    found = before.lines_taken(row.cells) if row.lines >= MANY_LINES else 0
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


class _CsvRow(NamedTuple):
    """A row of a table, or what is wrong with it; `lines` of the file were taken for it."""

    cells: list[str] | csv.Error
    lines: int


def _rows(reader: Any) -> Iterator[_CsvRow]:  # csv names no type of its reader
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
        yield _CsvRow(cells, max(1, reader.line_num - before))
        before = reader.line_num
