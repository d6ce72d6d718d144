"""Files and folders that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import orjson

from pipeline.errors import UserError
from pipeline.untrusted_files import open_regular

TEMPORARY_SUFFIX = ".partial"
_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_serial = itertools.count()


def file_hash(path: Path) -> str:
    """The SHA-256 of a regular file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open_regular(path, UserError) as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of each item, in order, several at a time; after an error no other is begun.

    For what opens or hashes files: a network file system makes the one wait, and the other leaves the lock of Python.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            yield from pool.map(function, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def free_bytes(path: Path) -> int:
    """The bytes that statvfs reports as free for ordinary users on the file system of `path`, which need not exist."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    system = os.statvfs(existing)
    return system.f_bavail * system.f_frsize


@contextlib.contextmanager
def published_file(path: Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A temporary file to fill, renamed to `path` when the block succeeds and removed when it fails.

    `scratch`: another folder of the same file system for the unfinished file; default: that of `path`.

    Raises:
        UserError: a folder lies at `path`.
    """
    # Processes of several machines may write the same file at the same time.
    own = f".{path.name}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}{TEMPORARY_SUFFIX}"
    unfinished = (scratch or path.parent) / own
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except IsADirectoryError:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: expected a file, found a folder; move it away and start again") from None
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_plain_name(name: str) -> bool:
    """Whether `name`, from an untrusted file, is a file name without any path."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, in UTF-8."""
    with published_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON, its keys in the given order, so that equal values give equal bytes."""
    with published_file(path) as file:
        file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@contextlib.contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `path` when the block succeeds."""
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
    """Renames the folder `new` to `path`; returns the path of the folder it replaced, if any, to be removed."""
    replaced = rename_aside(path)
    new.rename(path)
    sync(path.parent)
    return replaced


def rename_aside(path: Path) -> Path:
    """Renames the folder `path`, if it exists, out of the way; returns its new path, to be removed."""
    aside = path.with_name(f".{path.name}.old{TEMPORARY_SUFFIX}")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    return aside


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            # Some network file systems refuse this for a folder, and do not need it.
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
