"""JSON values and checked records in files.

A record has a checksum of its content in it: a schema alone would accept a number that a disk, a
copy or a hand has changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from pipeline.errors import UserError
from pipeline.files.publishing import as_utf8, published_file
from pipeline.files.reading import read_bytes

CHECKSUM = "checksum"
"""The key of a record's checksum, in its file."""
_Schema = TypeVar("_Schema", bound=BaseModel)


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
            as_utf8(text)
        raise


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


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
    # Not in pydantic's JSON form, which has null for some numbers that are not finite.
    # `with_named_floats` writes what JSON lacks.
    write_json(path, with_checksum(record.model_dump()))


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `content` of a record, as its file holds it, and its checksum."""
    stored = with_named_floats(content)
    return {**stored, CHECKSUM: json_hash(stored)}


def with_named_floats(value: Any) -> Any:
    """A JSON value in which numbers that are not finite are texts: NaN, Infinity, -Infinity; and
    paths, too.

    JSON has no such numbers: orjson writes null, which a schema refuses as a number. Of these texts
    pydantic makes the numbers again.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: with_named_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_named_floats(item) for item in value]
    return value
