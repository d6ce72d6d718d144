"""Files that are either whole or not there: written under a name of their own, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

TEMPORARY_SUFFIX = ".partial"
_serial = itertools.count()


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """The room there is for an ordinary user where `path` lies, or will lie: what statvfs says."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    system = os.statvfs(existing)
    return system.f_bavail * system.f_frsize


@contextlib.contextmanager
def published_file(path: Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A file to fill; it becomes `path` when the block ends well, and vanishes when it does not.

    `scratch` is a folder of the same file system for the unfinished file, where it should not lie beside `path`.
    """
    # Many processes, of many machines, may write the same file at the same time.
    own = f".{path.name}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}{TEMPORARY_SUFFIX}"
    unfinished = (scratch or path.parent) / own
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_plain_name(name: str) -> bool:
    """Whether `name`, which a stranger's file gave, leads to a place in its own folder and nowhere else."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, in UTF-8."""
    with published_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON with its keys in the order given, so that equal values are equal bytes."""
    with published_file(path) as file:
        file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@contextlib.contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path`, replacing what stood there, if the block ends without error."""
    partial = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                sync(file)
        sync(partial)
        shutil.rmtree(replace_directory(partial, path), ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_directory(new: Path, path: Path) -> Path:
    """Gives the folder `new` the name `path`; returns where what had it lies now, if anything did, to be removed."""
    replaced = rename_aside(path)
    new.rename(path)
    sync(path.parent)
    return replaced


def rename_aside(path: Path) -> Path:
    """Takes its name from the folder `path`, if it is there; returns where it lies now, to be removed."""
    nameless = path.with_name(f".{path.name}.old{TEMPORARY_SUFFIX}")
    shutil.rmtree(nameless, ignore_errors=True)
    if path.exists():
        path.rename(nameless)
    return nameless


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            # Some network file systems refuse this for a folder, and need no such thing.
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
