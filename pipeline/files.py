"""Files that are either whole or not there: written under a temporary name beside their place, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".partial"


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes `values` to `path` at once or not at all."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` at once or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path`, replacing what stood there, if the block ends without error."""
    partial = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(partial)
        _replace_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace_folder(new: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old{TEMPORARY_SUFFIX}")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
