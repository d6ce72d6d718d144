"""The content of a corpus's files: their sizes and the hashes of their blocks, to be compared in whole or in part."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from pipeline.errors import DataError
from pipeline.files import published_file

BLOCK_BYTES = 4 * 2**20


class FileContent(BaseModel):
    """What a file must hold: `blocks` are the hashes of its blocks of BLOCK_BYTES, the last of which may be shorter.

    A hash is the first 32 hexadecimal digits of the SHA-256.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: NonNegativeInt
    blocks: list[str]

    @model_validator(mode="after")
    def _covers_the_file(self) -> FileContent:
        expected = -(-self.bytes // BLOCK_BYTES)
        if len(self.blocks) != expected:
            raise ValueError(f"expected the hashes of {expected} blocks, found {len(self.blocks)}")
        return self


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = 0
        self._blocks: list[str] = []
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:  # noqa: ANN401  # any contiguous buffer
        """Appends `data`; returns its number of bytes."""
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        self._file.write(view)
        at = 0
        while at < len(view):
            piece = view[at : at + BLOCK_BYTES - self._bytes % BLOCK_BYTES]
            self._digest.update(piece)
            self._bytes += len(piece)
            at += len(piece)
            if self._bytes % BLOCK_BYTES == 0:
                self._blocks.append(_digits(self._digest))
                self._digest = hashlib.sha256()
        return len(view)

    @property
    def content(self) -> FileContent:
        """What has been written so far."""
        rest = [_digits(self._digest)] if self._bytes % BLOCK_BYTES else []
        return FileContent(bytes=self._bytes, blocks=[*self._blocks, *rest])


@contextlib.contextmanager
def hashed_file(path: Path, scratch: Path | None = None) -> Iterator[HashedFile]:
    """A `published_file` that is hashed while it is written."""
    with published_file(path, scratch) as file:
        yield HashedFile(file)


def content_of(path: Path) -> FileContent:
    """What a file that was just written holds."""
    with path.open("rb") as file:
        blocks = [_digits(hashlib.sha256(block)) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
        return FileContent(bytes=file.tell(), blocks=blocks)


def check_file(path: Path, content: FileContent, advice: str, *, blocks: Iterable[int] | None = None) -> int:
    """Compares the size of a file and some of its blocks, by default all; returns how many bytes were compared.

    Raises:
        DataError: it is missing, cannot be read, or differs.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != content.bytes:
                raise DataError(f"{path}: expected {content.bytes} bytes, found {size}; {advice}")
            compared = 0
            for number in range(len(content.blocks)) if blocks is None else blocks:
                start = number * BLOCK_BYTES
                block = os.pread(file.fileno(), BLOCK_BYTES, start)
                if _digits(hashlib.sha256(block)) != content.blocks[number]:
                    raise DataError(
                        f"{path}: damaged: the bytes {start} to {start + len(block)} are not those that were written; "
                        f"{advice}"
                    )
                compared += len(block)
            return compared
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {advice}") from None
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror}); {advice}") from None


def _digits(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:32]
