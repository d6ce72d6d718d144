"""Folders that appear whole, and replace only folders of their own kind."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import OutputError, full_disk_error_names
from pipeline.files.json_files import read_object
from pipeline.files.publishing import TEMPORARY_SUFFIX, own_prefix, own_temporary, sync
from pipeline.processes import process_exists


class FolderKind(NamedTuple):
    """A kind of folder that this project writes.

    Attributes:
        name: with its article, for messages.
        record: the JSON file in it whose entry `format` says what it is.
        format: that entry; its last word is the version.
    """

    name: str
    record: str
    format: str


def check_replaceable(
    path: Path, kind: FolderKind | None, *, overwrite: bool | None = None
) -> None:
    """Decides, for every writer of a folder, whether it may replace what is at `path`.

    It may replace an empty folder and a folder of its `kind`, and nothing else.

    Args:
        kind: None if the writer replaces no other folder.
        overwrite: whether the user named `path` with `--overwrite`; None if the command has no
            such option.

    Raises:
        OutputError: something else is there.
    """
    path = Path(os.path.realpath(path))
    if not path.exists():
        return
    if path.is_dir() and (overwrite or not any(path.iterdir()) or holds(kind, path)):
        return
    expected = "expected nothing here"
    if kind is not None:
        expected += f", or {kind.name} that is not damaged"
    found = _format_in(path / "manifest.json") or "another folder or file"
    remedy = "move it away"
    if overwrite is not None:
        remedy += ", or say --overwrite"
    raise OutputError(f"{path}: {expected}, found {found}; {remedy}")


def holds(kind: FolderKind | None, path: Path) -> bool:
    """Whether `path` is a folder of that kind, of any version."""
    if kind is None:
        return False
    # The version is the last word of a format.
    found, _, _ = _format_in(path / kind.record).rpartition(" ")
    expected, _, _ = kind.format.rpartition(" ")
    return found == expected


def other_kind(kind: FolderKind, path: Path) -> str | None:
    """What the record of the folder `path` says that it is, if that is another kind than `kind`;
    None: it is of that kind, or says nothing."""
    found = _format_in(path / kind.record)
    return found if found and not holds(kind, path) else None


def _format_in(record: Path) -> str:
    """What a JSON file says that its folder is; empty if it says nothing, or cannot be read."""
    try:
        return str(read_object(record, OutputError).get("format") or "")
    except (FileNotFoundError, OutputError):
        return ""


@contextlib.contextmanager
def published_folder(
    path: Path, kind: FolderKind | None, *, overwrite: bool | None = None
) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `path` when the block succeeds.

    Where `path` is a link, it replaces the folder that the link leads to.

    Raises:
        OutputError: as `check_replaceable`.
    """
    path = Path(os.path.realpath(path))
    aside = _aside(path)
    if aside.exists() and not path.exists():
        # A program ended after it had renamed the old folder, and before the new one was there.
        aside.rename(path)
    check_replaceable(path, kind, overwrite=overwrite)
    _remove_leftovers(path)
    # A name of its own, because processes of several machines may write the same folder at the same
    # time. Beside `path`, because a rename is atomic within one file system only.
    partial = own_temporary(path)
    partial.mkdir(parents=True)
    try:
        with full_disk_error_names(path):
            yield partial
            _sync_files(partial)
        check_replaceable(path, kind, overwrite=overwrite)  # the work may have taken hours
        # The old folder is removed when the new one is in place.
        shutil.rmtree(replace_directory(partial, path), ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Removes temporary folders for `path` that killed processes of this machine have left."""
    own = own_prefix(path.name)
    for leftover in path.parent.glob(f"{glob.escape(own)}*{TEMPORARY_SUFFIX}"):
        number, _, _ = leftover.name[len(own) :].partition(".")
        # The name has host, boot and PID namespace in it: a process number of another machine says
        # nothing about ours.
        if number.isdecimal() and not process_exists(int(number)):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Flushes all files to disk, and gives them the permissions of `folder`."""
    # safetensors makes files that their owner alone can read.
    permissions = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            is_shared = file.stat().st_nlink > 1  # it is a file of another folder too
            if not is_shared:
                file.chmod(permissions)
            sync(file)
    sync(folder)


def replace_directory(new: Path, path: Path) -> Path:
    """Renames the folder `new` to `path`.

    Returns the new path of the folder that it replaced, if any, which is to be removed.
    """
    # Linux cannot rename a folder over one that is not empty, so the old one goes aside first.
    # `published_folder` undoes a kill between the two renames.
    replaced = rename_aside(path)
    new.rename(path)
    sync(path.parent)
    return replaced


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old{TEMPORARY_SUFFIX}")


def rename_aside(path: Path) -> Path:
    """Renames the folder `path`, if it exists, out of the way; returns its new path, to be removed.

    If `path` is a link to a folder, the link is removed, and the folder stays.
    """
    aside = _aside(path)
    shutil.rmtree(aside, ignore_errors=True)
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rename(aside)
    return aside
