"""Reads files that another program, or a stranger, may have written or damaged.

Such a file must be a regular file of bounded size, and its content is decoded and validated before it is used. A fault
becomes an error of one line that names the file; the caller gives its type and what the user can do. A missing file is
a FileNotFoundError, because what it means depends on the caller. A fault of the file system that may pass stays an
OSError, which has its own exit code: the file may be whole.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from pipeline.errors import PASSING_FAULT, UserError, exit_code_of

MAX_BYTES = 256 * 2**20
"""Of a file that is read whole. The largest are a tokenizer and the record of a corpus of many shards."""

MAX_DEPTH = 64
"""Of lists and objects in each other in a JSON file: libraries that get its values copy and print them recursively."""

Record = TypeVar("Record", bound=BaseModel)


def open_regular(path: Path, error: type[UserError], advice: str = "copy it again") -> BinaryIO:
    """Opens a regular file for reading, without waiting for a FIFO or a device.

    Raises:
        FileNotFoundError: it does not exist.
        UserError: of the type `error`: it is not a regular file, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise _unreadable(path, fault, error, advice) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(f"{path}: expected a regular file, found {_kind(mode)}; {advice}")
    return os.fdopen(descriptor, "rb")


def require_regular(path: Path, error: type[UserError], advice: str = "copy it again") -> int:
    """Checks that a library can open `path` as a regular file; returns its size in bytes.

    Raises:
        as `open_regular`.
    """
    with open_regular(path, error, advice) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: Path, error: type[UserError], advice: str = "copy it again", *, limit: int = MAX_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        FileNotFoundError: it does not exist.
        UserError: of the type `error`: it is not a regular file, too large, or cannot be read.
    """
    with open_regular(path, error, advice) as file:
        try:
            content = file.read(limit + 1)
        except OSError as fault:
            raise _unreadable(path, fault, error, advice) from None
    if len(content) > limit:
        raise error(f"{path}: expected at most {limit} bytes, found more; {advice}")
    return content


def read_inside(folder: Path, name: str, error: type[UserError]) -> bytes:
    """The content of the file `name` of `folder`, which someone else made, to be passed on. Raises as `read_bytes`.

    Raises:
        UserError: of the type `error`: it is a link to a file elsewhere. A link to the blobs of a download by
            huggingface_hub, whose snapshots consist of such links, is followed.
    """
    path = folder / name
    found, home = (Path(os.path.realpath(place)) for place in (path, folder))
    allowed = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    if not any(found.is_relative_to(place) for place in allowed):
        raise error(f"{path}: links to {found}, outside its folder; put a copy of the file there")
    return read_bytes(path, error)


def read_text(path: Path, error: type[UserError], advice: str = "copy it again", *, limit: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file. Raises as `read_bytes`, and `error` for other bytes."""
    try:
        return read_bytes(path, error, advice, limit=limit).decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not UTF-8 ({fault.reason} at byte {fault.start}); {advice}") from None


def read_json(path: Path, error: type[UserError], advice: str = "copy it again", *, limit: int = MAX_BYTES) -> Any:  # noqa: ANN401
    """The value in a JSON file. Raises as `read_bytes`, and `error` for other content."""
    try:
        value = orjson.loads(read_bytes(path, error, advice, limit=limit))
    except orjson.JSONDecodeError as fault:
        raise error(f"{path}: not JSON ({fault}); {advice}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _values(outer) if isinstance(inner, (dict, list))]
    if level:
        raise error(f"{path}: expected at most {MAX_DEPTH} levels of lists and objects, found more; {advice}")
    return value


def read_object(
    path: Path, error: type[UserError], advice: str = "copy it again", *, limit: int = MAX_BYTES
) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_json`, and `error` for another value."""
    value = read_json(path, error, advice, limit=limit)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}; {advice}")
    return value


def read_record(
    path: Path,
    schema: type[Record],
    error: type[UserError],
    advice: str = "copy it again",
    *,
    limit: int = MAX_BYTES,
) -> Record:
    """The JSON record in a file, validated by `schema`. Raises as `read_bytes`, and `error` for another content."""
    content = read_bytes(path, error, advice, limit=limit)
    return validated(path, lambda: schema.model_validate_json(content), error, advice)


def validated(path: Path, validate: Callable[[], Record], error: type[UserError], advice: str) -> Record:
    """What `validate` makes of the content of `path`; raises `error` for a fault that pydantic finds."""
    try:
        return validate()
    except ValidationError as fault:
        raise error(f"{path}: {first_fault(fault)}; {advice}") from None


def first_fault(error: ValidationError) -> str:
    """The first of the faults that a schema found, with its place."""
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"])) or "the file"
    return f"{where}: {fault['msg']}"


def _unreadable(path: Path, fault: OSError, error: type[UserError], advice: str) -> Exception:
    if exit_code_of(fault) == PASSING_FAULT:
        return OSError(fault.errno, fault.strerror, str(path))
    return error(f"{path}: cannot be read ({fault.strerror}); {advice}")


def _values(value: Any) -> Iterable[Any]:  # noqa: ANN401
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "another kind of file")
