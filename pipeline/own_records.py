"""The project's own records: JSON files that hold a checksum of their content.

A schema alone would accept a number that a disk, a copy or a hand has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import orjson
from pydantic import BaseModel

from pipeline.errors import UserError
from pipeline.files import write_json
from pipeline.untrusted_files import Record, read_object, validated

_CHECKSUM = "checksum"


def write_record(path: Path, record: BaseModel) -> None:
    """Publishes `record` with its checksum."""
    content = record.model_dump(mode="json")
    write_json(path, {**content, _CHECKSUM: checksum(content)})


def read_record(
    path: Path,
    schema: type[Record],
    error: type[UserError],
    advice: str,
    *,
    may_lack_checksum: Callable[[Record], bool] = lambda _: False,
) -> Record:
    """A record as `write_record` wrote it.

    Args:
        path: its file.
        schema: its type.
        error: the type of the error if it is damaged.
        advice: what the user can do then.
        may_lack_checksum: whether a record of this content was written before there were checksums.

    Raises:
        FileNotFoundError: it does not exist.
        UserError: of the type `error`: it is damaged, or another record.
    """
    content = read_object(path, error, advice)
    expected = content.pop(_CHECKSUM, None)
    record = validated(path, lambda: schema.model_validate(content), error, advice)
    if expected != checksum(content) and not (expected is None and may_lack_checksum(record)):
        raise error(
            f"{path}: its content does not match its checksum: it was changed, damaged, or written by another version; "
            f"{advice}"
        )
    return record


def checksum(value: object) -> str:
    """A hash of a JSON value: the first 32 hexadecimal digits of the SHA-256 of its compact form."""
    return hashlib.sha256(orjson.dumps(value)).hexdigest()[:32]
