"""Reading a run's metrics.jsonl: a line a step, as a run that was killed at any moment left them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import RunFolderError

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, none where there is no file; one that a killed process left unfinished is left out.

    Raises:
        RunFolderError: the file cannot be read.
    """
    try:
        return _whole(path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); copy it again") from None


def last_metrics(path: Path, count: int, tail_bytes: int) -> list[dict[str, Any]]:
    """The same of at most the last `count` lines and `tail_bytes` bytes, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - tail_bytes))
            return _whole(file.read().splitlines()[-count:])
    except FileNotFoundError:
        return []


def _whole(texts: Iterable[str | bytes]) -> list[dict[str, Any]]:
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
