"""A file of records that grows by whole records, and waits in memory while a disk is full."""

from __future__ import annotations

import os
from pathlib import Path


class AppendedFile:
    """Records by step, to be appended to the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[tuple[int, bytes]] = []

    def add(self, step: int, record: bytes) -> None:
        """Adds a record of `step`, which `write` writes."""
        self._waiting.append((step, record))

    def drop_after(self, step: int) -> None:
        """Drops the records of later steps that wait."""
        self._waiting = [record for record in self._waiting if record[0] <= step]

    def write(self) -> None:
        """Appends what waits: all of it, or nothing.

        Raises:
            OSError: the disk is full, or the folder cannot be written. The records go on waiting.
        """
        if not self._waiting:
            return
        rest = memoryview(b"".join(record for _, record in self._waiting))
        # Unbuffered: a buffer would keep what a full disk refused, and write it again when closed.
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while rest:
                    written = file.write(rest)
                    rest = rest[written:]
            except OSError:
                # A full disk may have taken half of a record.
                file.truncate(end)
                raise
        self._waiting.clear()
