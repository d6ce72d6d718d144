"""Rank-aware logging. Library code asks for a logger; only the command lines call `configure`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar, cast

from tqdm import tqdm

_FORMAT = "%(asctime)s %(where)s %(levelname).1s %(message)s"


class _Where(logging.Filter):
    """Puts `rank@node` on every record, and lets only rank 0 speak below WARNING."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.where = f"[{rank}@{node()}]" if world_size > 1 else "[main]"

    def filter(self, record: logging.LogRecord) -> bool:
        record.where = self.where
        return self.rank == 0 or record.levelno >= logging.WARNING


def get_logger(name: str) -> logging.Logger:
    """A logger below the package's own, so that one `configure` governs them all."""
    return logging.getLogger(f"pipeline.{name.removeprefix('pipeline.')}")


def node() -> str:
    """This machine as the cluster calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def configure(level: int = logging.INFO) -> None:
    """Sends the package's records to stderr. `RANK` and `WORLD_SIZE` are read from the environment."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_Where(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))))
    root = logging.getLogger("pipeline")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


# --- How far long work is: a bar on a terminal, now and then a plain line in a log; of what is soon done, nothing ---

_BEFORE_THE_FIRST_S = 1.0
_BETWEEN_DRAWINGS_S = 0.2
_BETWEEN_LOG_LINES_S = 30.0
_LOG_LINE = "{desc}: {percentage:.0f} % of {total_fmt}{unit}, {rate_fmt}{postfix}, {remaining} left"
_logger = get_logger(__name__)
_T = TypeVar("_T")


class _Bar(tqdm):  # type: ignore[type-arg]  # it counts, and iterates over nothing
    monitor_interval = 0  # no thread of its own


class _LogLines:
    """A file for tqdm, whose every drawing becomes a record of the log."""

    def write(self, drawing: str) -> None:
        if line := drawing.strip():
            _logger.info("%s", line)

    def flush(self) -> None:
        pass


def progress_bar(what: str, total: float, unit: str) -> tqdm[Any]:
    """A bar to `update`, for a `with`. `unit` follows a number with its SI prefix: "B", " windows".

    On a terminal it appears after a second and vanishes at the end; elsewhere it logs a line every half minute.
    """
    terminal = sys.stderr.isatty()
    file = sys.stderr if terminal else cast("IO[str]", _LogLines())
    return _Bar(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        miniters=1,
        leave=False,
        file=file,
        dynamic_ncols=terminal,
        delay=_BEFORE_THE_FIRST_S if terminal else _BETWEEN_LOG_LINES_S,
        mininterval=_BETWEEN_DRAWINGS_S if terminal else _BETWEEN_LOG_LINES_S,
        bar_format=None if terminal else _LOG_LINE,
    )


def counted(items: Iterable[_T], what: str, total: int, unit: str) -> Iterator[_T]:
    """The `items`, of which there are `total`, under a bar."""
    with progress_bar(what, total, unit) as bar:
        for item in items:
            yield item
            bar.update()
