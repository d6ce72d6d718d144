"""Files appear whole or not at all: write under another name, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

_serial = itertools.count()


def scratch_name(path: Path, scratch: Path | None = None) -> Path:
    """A name that no one else uses for the unfinished `path`, in its folder or in `scratch` (same file system)."""
    return (scratch or path.parent) / f".{path.name}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}.tmp"


@contextlib.contextmanager
def publishing(path: Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """Opens a file that becomes `path` when the block ends well, and vanishes when it does not."""
    unfinished = scratch_name(path, scratch)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def publish_json(path: Path, value: object, scratch: Path | None = None) -> None:
    """Writes `value` as indented JSON with its keys in the order given, so that equal values are equal bytes."""
    with publishing(path, scratch) as file:
        file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut; some network file systems refuse it, and need no such thing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
