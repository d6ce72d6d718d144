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
from pipeline.data.sources.streams import Stream, encoding_advice
from pipeline.errors import DataError

_MANY_LINES = 10
_LOOKING_LIKE_ROWS = 0.8
"""A quoted field of so many lines, so many of which have a row's delimiters, is likely due to a stray quote."""
_QUOTING: dict[str, Quoting] = {"csv": "standard", "tsv": "none"}
_UNCLOSED = "unexpected end of data"
"""What Python's csv says at the end of a file within a quoted field."""


def csv_records(stream: Stream, keys: Keys, kind: str) -> Iterator[Record]:
    """The records of a table whose first row names the columns; offsets are row numbers.

    Raises DataError where the columns are not those of `keys`, or a quotation mark is not closed.
    """
    csv.field_size_limit(MAX_RECORD_BYTES)
    quoting = keys.quoting or _QUOTING[kind]
    texts = (
        line.content.removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape") + "\n"
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
            raise DataError(repeated_column(stream.path, key))
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
