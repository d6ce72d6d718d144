"""The content of a corpus's files: their sizes and the hashes of their blocks, to be compared in whole or in part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from pipeline.errors import DataError

BLOCK_BYTES = 4 * 2**20


class FileContent(BaseModel):
    """What a file must hold: `blocks` are the hashes of its blocks of BLOCK_BYTES, the last of which may be shorter.

    A hash is the first 32 hexadecimal digits of the SHA-256.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: NonNegativeInt
    blocks: list[str]


def content_of(path: Path) -> FileContent:
    """What a file that was just written holds."""
    with path.open("rb") as file:
        blocks = [_digits(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
        return FileContent(bytes=file.tell(), blocks=blocks)


def check_file(path: Path, content: FileContent, advice: str, *, blocks: Iterable[int] | None = None) -> None:
    """Compares the size of a file and some of its blocks, by default all.

    Raises:
        DataError: it is missing or differs.
    """
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != content.bytes:
                raise DataError(f"{path}: expected {content.bytes} bytes, found {size}; {advice}")
            for number in range(len(content.blocks)) if blocks is None else blocks:
                start = number * BLOCK_BYTES
                block = os.pread(file.fileno(), BLOCK_BYTES, start)
                if _digits(block) != content.blocks[number]:
                    raise DataError(
                        f"{path}: damaged: the bytes {start} to {start + len(block)} are not those that were written; "
                        f"{advice}"
                    )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {advice}") from None


def _digits(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:32]
