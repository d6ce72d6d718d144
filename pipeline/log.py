"""Rank-aware logging. Library code asks for a logger; only the command lines call `configure`."""

from __future__ import annotations

import logging
import os
import socket
import sys

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
