"""Runs a benchmark in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def rows_of(
    benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> list[dict[str, Any]]:
    """The rows that it writes to the file of --json, which is left in `folder` alone."""
    output = folder / "out" / "rows.json"
    monkeypatch.setattr(
        "sys.argv", [benchmark.__name__, "--json", str(output), *map(str, arguments)]
    )
    benchmark.main()
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return rows
