"""What the benchmarks share: the option --json, and rows of figures as a table and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.evaluation.table import table
from pipeline.files import write_json

Row = dict[str, Any]
"""What was measured of one contender, the units in the names; what could not be measured is missing."""
ROOT = Path(__file__).resolve().parents[1]


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser; `text` is its docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser


def print_rows(rows: Sequence[Row], names: Sequence[str] = ()) -> None:
    """Prints a table with these columns, or with those of the first row."""
    names = names or list(*rows[:1])
    lines = [[_cell(row.get(name, "-")) for name in names] for row in rows]
    print(table([name.replace("_", " ") for name in names], lines), flush=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_rows(options: argparse.Namespace, rows: Sequence[Row], **about: object) -> None:
    """Writes the rows, with the options that they were measured with, to the file of --json, if that is given."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, {"settings": settings, **about, "rows": list(rows)})
