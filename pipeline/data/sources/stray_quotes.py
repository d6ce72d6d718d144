"""Tells a cell that a stray quotation mark filled with rows of its table from a text of many lines.

Both look alike to csv: a mark opens the cell, and one far below closes it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence

MANY_LINES = 10
"""A cell of fewer lines is a text."""
_LOOKING_LIKE_ROWS = 0.8
# The rows before, and the beginnings of their cells, that tell what a column holds.
_KNOWN_ROWS = 20
_KNOWN_CHARACTERS = 64
# The fewest rows that show a column which counts its rows, or has few values.
_COUNTING_ROWS = 3
_LABELLED_ROWS = 4
_MOST_SHAPES = 4
_IDENTIFIER = re.compile(r"[0-9A-Za-z_-]{8,}")

_Test = Callable[[str, int], bool]
"""Whether the cell of a line, which has a number from 0 on, is like those of the rows before."""


class RowsBefore:
    """The last rows of a table, by which the lines of a cell are known as more of its rows.

    Delimiters alone do not tell: in a table of two columns any line with a comma has those of a
    row. Where in doubt, lines are text. A text that is lost is worse than one that holds rows.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._rows: deque[list[str]] = deque(maxlen=_KNOWN_ROWS)

    def add(self, cells: Sequence[str]) -> None:
        """Takes the next row of the table."""
        self._rows.append([cell[:_KNOWN_CHARACTERS] for cell in cells])

    def lines_taken(self, cells: Sequence[str]) -> int:
        """The lines of the cell of a row that are rows of the table; 0 where it is a text."""
        columns = range(len(cells))
        place = max(columns, key=lambda column: cells[column].count("\n"))
        pieces = cells[place].split("\n")
        if len(pieces) < MANY_LINES:
            return 0
        first, *inner, last = pieces
        # The cell begins within a row, whose rest is in its first line, and ends within another.
        rest = len(cells) - 1 - place
        if first.count(self._delimiter) != rest or last.count(self._delimiter) != place:
            return 0
        tests: dict[int, _Test] = {}
        for column in columns:
            # Of the row's own cells those before the mark are of the row of the first line, the
            # others of that of the last.
            own_number = -1 if column < place else len(inner)
            before = [row[column] for row in self._rows]
            test = _test_of(before, cells[column], own_number) if column != place else None
            if test is not None:
                tests[column] = test
        if not tests:
            return 0
        alike = 0
        for number, line in enumerate(inner):
            found = line.removesuffix("\r").split(self._delimiter)
            if len(found) == len(cells) and all(
                test(found[column], number) for column, test in tests.items()
            ):
                alike += 1
        return len(pieces) if alike >= _LOOKING_LIKE_ROWS * len(inner) else 0


def _test_of(before: list[str], own: str, own_number: int) -> _Test | None:
    """What tells a cell of a column from text; None where the column holds text itself.

    `before`: its cells in the rows before; `own`: in the row in question, which is the line
    `own_number`.
    """
    if _is_counting(before) and _is_number(own):
        start = int(own) - own_number
        return lambda cell, number: _is_number(cell) and int(cell) == start + number
    known = [cell for cell in [*before, own[:_KNOWN_CHARACTERS]] if cell]
    if not known:
        return None
    shapes = {_shape(cell) for cell in known}
    if len(shapes) <= _MOST_SHAPES and all("0" in shape for shape in shapes):
        # Numbers, dates, and names that end with a number.
        return lambda cell, _: _shape(cell) in shapes
    length = len(known[0])
    if all(len(cell) == length and _IDENTIFIER.fullmatch(cell) for cell in known):
        # Hashes and UUIDs.
        return lambda cell, _: len(cell) == length and _IDENTIFIER.fullmatch(cell) is not None
    values = {*known}
    if len(known) >= _LABELLED_ROWS and 2 * len(values) <= len(known):
        return lambda cell, _: cell[:_KNOWN_CHARACTERS] in values
    return None


def _is_counting(cells: list[str]) -> bool:
    """Whether each is the number after the one before, as the index of pandas is."""
    if len(cells) < _COUNTING_ROWS or not all(map(_is_number, cells)):
        return False
    start = int(cells[0])
    return [int(cell) for cell in cells] == [*range(start, start + len(cells))]


def _is_number(cell: str) -> bool:
    # Python reads no number of thousands of digits.
    return cell.isascii() and cell.isdigit() and len(cell) <= _KNOWN_CHARACTERS


def _shape(cell: str) -> str:
    """A cell with 0 for each run of digits."""
    return re.sub(r"[0-9]+", "0", cell)
