"""Files that appear whole: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import OutputError, UserError, full_disk_error_names, in_one_line
from pipeline.processes import machine_id

TEMPORARY_SUFFIX = ".partial"
_serial = itertools.count()
_UNSUPPORTED = {
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EINVAL,
    errno.EMLINK,
    errno.EACCES,
}
"""How file systems refuse hard links, and a rename that does not replace."""
_NO_REPLACE = 1  # RENAME_NOREPLACE
_CLAIM_S = 10.0
"""After this time a claim counts as left behind by a process that was killed."""
_CLAIM_POLL_S = 0.02


def as_utf8(text: str) -> bytes:
    """`text` in UTF-8.

    Raises:
        OutputError: it cannot be encoded, as a file's name that is not UTF-8 itself.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as fault:
        raise OutputError(in_one_line(fault)) from None


def own_prefix(name: str) -> str:
    """The beginning of temporary names for `name` that only processes of this machine choose.

    A machine is one PID namespace of one host.
    """
    machine_hash = hashlib.sha256(machine_id().encode()).hexdigest()[:12]
    return f".{name}.{socket.gethostname()}.{machine_hash}."


def own_temporary(path: Path) -> Path:
    """A name beside `path` that no other process chooses, of this machine or another one."""
    serial = next(_serial)
    return path.with_name(f"{own_prefix(path.name)}{os.getpid()}.{serial}{TEMPORARY_SUFFIX}")


def make_parent(path: Path) -> None:
    """Makes the folder in which `path` is to be written.

    Raises:
        OutputError: there is none, and none can be made, as where a file is in its place.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as fault:
        raise OutputError(
            f"{path}: expected a folder {path.parent}, which cannot be made "
            f"({fault.filename}: {fault.strerror}); choose another place"
        ) from None


@contextlib.contextmanager
def published_file(path: Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A temporary file to fill, renamed to `path` when the block succeeds, else removed.

    It lies in `scratch`, a folder of the same file system, or else beside `path`.

    Raises:
        UserError: `path` is a folder.
    """
    # Processes of several machines may write the same file at the same time.
    unfinished = (scratch or path.parent) / own_temporary(path).name
    try:
        with full_disk_error_names(path), unfinished.open("wb") as file:
            yield file
            file.flush()
            # Before the rename: a file system may write the new name to disk before the data, and a
            # power failure then leaves an empty file under it (ext4's delayed allocation).
            os.fsync(file.fileno())
        unfinished.replace(path)
    except IsADirectoryError:
        raise UserError(
            f"{path}: expected a file, found a folder; move it away and start again"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)  # it is still there if the block failed
    # The rename is an entry of the folder, and is on the disk only with that.
    sync(path.parent)


def publish_first(unfinished: Path, path: Path) -> bool:
    """Renames the complete file `unfinished` to `path` in the same folder; never replaces a file.

    Of several processes, also of several machines, one is first. Returns whether this one was;
    `unfinished` is gone in any case.

    Raises:
        OSError: the file system can do it in none of three ways, or fails.
    """
    try:
        # Each kind of file system has one of these.
        for rename in (_rename_by_link, _rename_without_replacing, _rename_under_claim):
            try:
                rename(unfinished, path)
            except FileExistsError:
                return False
            except OSError as fault:
                # Some file systems have no hard links (FAT, many of FUSE), and some no such rename
                # (NFS).
                if rename is _rename_under_claim or fault.errno not in _UNSUPPORTED:
                    raise
            else:
                break
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)
    return True


def _rename_by_link(old: Path, new: Path) -> None:
    # Unlike a rename, a link fails where `new` exists; `publish_first` then removes `old`.
    os.link(old, new)


def _rename_without_replacing(old: Path, new: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, "no renameat2")
    here = -100  # AT_FDCWD of fcntl.h: relative paths begin at the current folder
    if library.renameat2(here, os.fsencode(old), here, os.fsencode(new), _NO_REPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old), None, str(new))


def _rename_under_claim(old: Path, new: Path) -> None:
    """An ordinary rename, by the one process that has made a folder beside `new`."""
    claim = new.with_name(f".{new.name}.claim{TEMPORARY_SUFFIX}")
    deadline = time.monotonic() + _CLAIM_S
    while True:
        if new.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        try:
            claim.mkdir()
            break
        except FileExistsError:
            # The claim is a folder, because mkdir is atomic on every file system, on NFS and FUSE
            # too. Its owner needs milliseconds.
            if time.monotonic() > deadline:
                break
            time.sleep(_CLAIM_POLL_S)
    try:
        if new.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        old.rename(new)
    finally:
        with contextlib.suppress(OSError):
            claim.rmdir()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` in UTF-8; the file appears whole.

    Raises:
        OutputError: as `as_utf8`.
    """
    with published_file(path) as file:
        file.write(as_utf8(text))


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems refuse it for a folder, and do not need it.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
