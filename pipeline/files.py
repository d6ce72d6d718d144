"""Reading and writing files: one typed line for each fault, and no file that is half written.

A file is written under a temporary name, flushed to disk, then renamed.

What cannot be read becomes an error of the caller's type, which names the file and ends with the
caller's advice. A missing file stays a FileNotFoundError, because what it means depends on the
caller. A fault of the file system that may pass stays an OSError, which has its own exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import itertools
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from pipeline.errors import (
    TRANSIENT_FAULT,
    OutputError,
    UserError,
    exit_code_of,
    full_disk_names,
    in_one_line,
)

TEMPORARY_SUFFIX = ".partial"
CHECKSUM = "checksum"
"""The key of a record's checksum, in its file."""
LONGEST_NAME = 255
"""How many bytes Linux file systems allow in a file's name."""
_THREADS = 8
SAMPLE_BYTES = 4096
_BLOCK_BYTES = 4 * 2**20
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Schema = TypeVar("_Schema", bound=BaseModel)
_UTF8_MODE = "PYTHONUTF8"
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
_CLAIM_POLL_S = 0.02


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # In blocks: files may be larger than memory, and hashlib lets other threads run meanwhile.
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sampled_hash(path: Path, blocks: int) -> str:
    """A hash of a file's size and of `blocks` of its blocks, the first and the last included."""
    size = path.stat().st_size
    last = max(0, size - SAMPLE_BYTES)
    # The size is part of it: a file that was cut between two of its blocks differs.
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(last * number // max(1, blocks - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def json_hash(value: object) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a JSON value in its compact form."""
    return hashlib.sha256(json_bytes(value)).hexdigest()[:32]


def json_bytes(value: object, option: int | None = None) -> bytes:
    """`value` as JSON; `option` is orjson's.

    Raises:
        OutputError: a text in it is not UTF-8, as the name of a file may be.
        TypeError: JSON has no such value.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        for text in _texts(value):
            _as_utf8(text)
        raise


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _as_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as fault:
        raise OutputError(in_one_line(fault)) from None


def use_utf8() -> None:
    """Starts this program again in Python's UTF-8 mode if the locale has another encoding.

    In such a locale, as C is, file names that are not ASCII could not be recorded, or would be
    recorded as other names than in a UTF-8 locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8_MODE) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _UTF8_MODE: "1"})


def read_bytes(path: Path, error: type[UserError], advice: str = "copy it again") -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file system fails, perhaps for a moment.
        UserError: an `error`, ending with `advice`, if this user cannot read it.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as fault:
        if exit_code_of(fault) == TRANSIENT_FAULT:
            raise OSError(fault.errno, fault.strerror, str(path)) from None
        raise error(f"{path}: cannot be read ({fault.strerror}); {advice}") from None


def read_text(path: Path, error: type[UserError], advice: str = "copy it again") -> str:
    """The text of a UTF-8 file.

    Raises:
        UserError: as `read_bytes`, and an `error` if the file is not UTF-8.
    """
    try:
        return read_bytes(path, error, advice).decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not UTF-8 ({fault.reason} at byte {fault.start}); {advice}") from None


def read_object(
    path: Path, error: type[UserError], advice: str = "copy it again"
) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: as `read_bytes` and `parse_object`.
    """
    return parse_object(read_bytes(path, error, advice), path, error, advice)


def parse_object(data: bytes, path: Path, error: type[UserError], advice: str) -> dict[str, Any]:
    """The JSON object in `data`, the content of `path`.

    Raises:
        UserError: an `error`, ending with `advice`, if there is anything else in it.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as fault:
        raise error(f"{path}: not JSON ({fault}); {advice}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}; {advice}")
    return value


def read_record(
    path: Path,
    schema: type[_Schema],
    error: type[UserError],
    advice: str = "copy it again",
    *,
    needs_checksum: bool = False,
) -> _Schema:
    """The JSON object in a file as a `schema`, compared with the checksum of `write_record`.

    Raises:
        UserError: as `read_object` and `check_checksum`; an `error` if it is of another schema.
    """
    content = read_object(path, error, advice)
    checksum = content.pop(CHECKSUM, None)
    try:
        record = schema.model_validate(content)
    except ValidationError as fault:
        raise error(f"{path}: {first_fault(fault)}; {advice}") from None
    check_checksum(content, checksum, path, error, advice, is_required=needs_checksum)
    return record


def check_checksum(
    content: dict[str, Any],
    expected: object,
    path: Path,
    error: type[UserError],
    advice: str,
    *,
    is_required: bool = False,
) -> None:
    """Compares a record's `content`, without its checksum, with the checksum that was `expected`.

    Earlier versions wrote none, so that None is accepted. Where the checksum `is_required`, it is
    refused, because a record that was changed by hand may lack it too.

    Raises:
        UserError: an `error`, ending with `advice`, if they differ.
    """
    if expected is None and is_required:
        raise error(
            f"{path}: has no checksum: an earlier version wrote it, or it was changed; {advice}"
        )
    if expected is not None and expected != _checksum_of(content):
        raise error(
            f"{path}: does not match its checksum: it was changed or damaged after it was written; "
            f"{advice}"
        )


def _checksum_of(content: dict[str, Any]) -> str | None:
    """The hash of a record's content.

    None where orjson cannot write what it has read, such as lists a thousand deep: no record holds
    them.
    """
    try:
        return json_hash(content)
    except orjson.JSONEncodeError:
        return None


def first_fault(error: ValidationError) -> str:
    """The first of the faults that a schema found, with its place."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}"


def read_inside(folder: Path, name: str, error: type[UserError]) -> bytes:
    """The content of the file `name` of `folder`, which someone else made and others will get.

    Links into the blobs of a download by huggingface_hub, of which its snapshots consist, are
    followed.

    Raises:
        UserError: as `read_bytes`, and an `error` if it is a link to a file elsewhere.
    """
    path = folder / name
    target = path.resolve()
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise error(f"{path}: links to {target}, outside its folder; put a copy of the file there")
    return read_bytes(target, error)


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of each item, in order, several at a time; after an error no other is begun.

    It is for functions that open or hash files: a network file system makes the first wait, and
    the second releases Python's global lock.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        # After an error, `map` cancels the calls that have not begun.
        yield from pool.map(function, items)


@lru_cache(maxsize=1)
def machine() -> str:
    """The id of this machine's last boot, and of this process's PID namespace.

    Two processes of the same number on this machine differ in it. Host names need not be unique,
    and containers on one host have their own namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def process_exists(pid: int) -> bool:
    """Whether there is a process of this number, of any user.

    The signal 0 finds it even where /proc hides other users' processes (hidepid).
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _own_prefix(name: str) -> str:
    """The beginning of temporary names for `name` that only processes of this machine choose.

    A machine is one PID namespace of one host.
    """
    machine_hash = hashlib.sha256(machine().encode()).hexdigest()[:12]
    return f".{name}.{socket.gethostname()}.{machine_hash}."


def own_temporary(path: Path) -> Path:
    """A name beside `path` that no other process chooses, of this machine or another one."""
    serial = next(_serial)
    return path.with_name(f"{_own_prefix(path.name)}{os.getpid()}.{serial}{TEMPORARY_SUFFIX}")


def nearest_existing(path: Path) -> Path:
    """`path`, or the first folder above it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def free_bytes(path: Path) -> int:
    """The free bytes, for ordinary users, on the file system of `path`, which need not exist."""
    system = os.statvfs(nearest_existing(path))
    return system.f_bavail * system.f_frsize


def held_bytes(folder: Path) -> int:
    """The bytes of all files in `folder`; 0 where there is no such folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove files meanwhile
            if path.is_file():
                total += path.stat().st_size
    return total


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
        with full_disk_names(path), unfinished.open("wb") as file:
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
    here = -100  # AT_FDCWD: relative paths begin at the current folder
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
            if time.monotonic() > deadline:  # of a process that was killed
                break
            time.sleep(_CLAIM_POLL_S)
    try:
        if new.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        old.rename(new)
    finally:
        with contextlib.suppress(OSError):
            claim.rmdir()


def is_plain_name(name: str) -> bool:
    """Whether `name`, from an untrusted file, is a valid file name without any path."""
    if name in ("", ".", "..") or len(name.encode(errors="replace")) > LONGEST_NAME:
        return False
    return not {"/", "\\", "\0"} & set(name)


def write_text(path: Path, text: str) -> None:
    with published_file(path) as file:
        file.write(_as_utf8(text))


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON, its keys in the given order.

    Equal values give equal bytes.

    Raises:
        OutputError: as `json_bytes`.
    """
    with published_file(path) as file:
        file.write(json_bytes(value, orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_record(path: Path, record: BaseModel) -> None:
    """Writes `record` as JSON with a checksum of its content, for `read_record`.

    A schema alone would accept a number that a disk, a copy or a hand has changed.
    """
    write_json(path, with_checksum(record.model_dump(mode="json")))


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """The `content` of a record and its checksum."""
    return {**content, CHECKSUM: json_hash(content)}


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
    # Processes of several machines may write the same folder at the same time.
    # Beside `path`: a rename is atomic within one file system only.
    partial = own_temporary(path)
    partial.mkdir(parents=True)
    try:
        with full_disk_names(path):
            yield partial
            _sync_files(partial)
        check_replaceable(path, kind, overwrite=overwrite)  # the work may have taken hours
        # The old folder is removed when the new one is in place.
        shutil.rmtree(replace_directory(partial, path), ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Removes temporary folders for `path` that killed processes of this machine have left."""
    own = _own_prefix(path.name)
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


_PAGE = re.compile(r"\bdocs/[\w/.-]+?\.md(#[\w-]+)?")


def with_pages_found(text: str) -> str:
    """`text` with every page of docs/ that it names as a user of the package can find it.

    In the project's folder the names stay. Elsewhere the table of settings is what a command
    prints. Other pages get their whole path if this is a checkout; else the text says that they
    are in the source.
    """
    if Path("docs/configuration.md").exists():
        return text
    root = Path(__file__).resolve().parent.parent

    def place_of(page: re.Match[str]) -> str:
        path, _, _ = page[0].partition("#")
        if path == "docs/configuration.md":
            return "scale-cpt describe-config"
        if (root / path).exists():
            return str(root / page[0])
        return f"{page[0]} in the source of scale-cpt"

    return _PAGE.sub(place_of, text)


SHIPPED = ("configs", "ds_configs", "slurm", "examples")
"""What a folder to work in holds: configurations, batch scripts, and the demo's model and texts."""


def shipped() -> Path:
    """The folder that holds `SHIPPED`: inside an installed package, or else the checkout.

    setup.py copies them into the package.
    """
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    if inside.is_dir():
        return inside
    return package.parent
