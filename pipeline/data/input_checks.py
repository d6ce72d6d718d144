"""What an input file must be before it is read, and how much text it may hold.

A stranger may have made it, or a copy may have been cut short.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import DataError

# Of all holes of a sparse file together: text has none.
_MAX_HOLE_BYTES = 32 * 2**20
# Text compresses to a tenth, and what repeats itself to a hundredth.
_MAX_GROWTH = 256
_ALWAYS_ALLOWED_BYTES = 2**30
_ADVICE = "leave it out, or copy it again"


def open_input(path: Path) -> BinaryIO:
    """Opens an input file.

    Raises:
        DataError: it does not exist, is not a regular file, or is mostly holes.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {_ADVICE}") from None
    try:
        _refuse_holes(path, file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def input_size(path: Path) -> int:
    """The bytes of an input file. Raises as `open_input`."""
    with open_input(path) as file:
        return os.fstat(file.fileno()).st_size


def refuse_bomb(path: Path, decoded: int) -> None:
    """Raises DataError if `decoded` bytes are far more than a file of text can hold."""
    size = path.stat().st_size
    if decoded > max(_ALWAYS_ALLOWED_BYTES, size * _MAX_GROWTH):
        raise DataError(
            f"{path}: its {size} bytes decode to {decoded} or more, which is not text: a decompression bomb, or "
            f"damaged; {_ADVICE}"
        )


def _refuse_holes(path: Path, descriptor: int) -> None:
    """Refuses a file that is much longer than what was written to it, as an interrupted copy leaves it."""
    size = os.fstat(descriptor).st_size
    position = holes = 0
    while position < size:
        start = os.lseek(descriptor, position, os.SEEK_HOLE)
        try:
            position = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError:  # no more data
            position = size
        holes += position - start
        if holes > _MAX_HOLE_BYTES:
            raise DataError(f"{path}: {holes} bytes up to byte {position} were never written; the copy was cut short")
    os.lseek(descriptor, 0, os.SEEK_SET)
