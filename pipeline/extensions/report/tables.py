"""The tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    """A figure, and a note after it in small type."""

    text: str
    small: str = ""


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
        style: of the mark before its label; None: no mark.
        is_reference: whether the other rows are compared with it: it is shown in grey.
    """

    label: str
    cells: Sequence[Cell]
    style: int | None = None
    is_reference: bool = False


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        header: the name of each column; empty for a list of facts, each with a single cell.
        above: the names of groups of columns, each with its number of columns.
    """

    header: Sequence[str]
    rows: Sequence[TableRow]
    above: Sequence[tuple[str, int]] = ()
