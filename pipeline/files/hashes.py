"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLE_BYTES = 4096
"""The size of a block of `sampled_hash`: a page, the least that a disk reads."""
BLOCK_BYTES = 4 * 2**20


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # In blocks: files may be larger than memory, and hashlib lets other threads run meanwhile.
        while block := file.read(BLOCK_BYTES):
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
