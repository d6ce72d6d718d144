"""A file that grows by whole pieces, and waits where the disk is full."""

from __future__ import annotations

import io
from collections import deque
from pathlib import Path

from pipeline import log

_logger = log.get_logger(__name__)


class AppendedFile:
    """Takes pieces for the end of `path`. What cannot be written is held and tried again with the next piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._held: deque[bytes] = deque()
        self._failing = False

    def append(self, *pieces: bytes) -> None:
        """Writes what is held and then `pieces`, or holds them too."""
        self._held.extend(pieces)
        try:
            while self._held:
                self._write(self._held[0])
                self._held.popleft()
            self._failing = False
        except OSError as fault:
            if not self._failing:
                _logger.error("%s: cannot be written (%s); what goes into it is held", self.path, fault.strerror)
            self._failing = True

    def _write(self, piece: bytes) -> None:
        """All of `piece` or nothing."""
        if self._file is None:
            self._file = io.FileIO(self.path, "a")
        whole, rest = self._file.seek(0, io.SEEK_END), memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(whole)
            raise

    def close(self) -> None:
        """Tries for the last time."""
        self.append()
        if self._held:
            _logger.error("%s: the last %d pieces are lost", self.path, len(self._held))
        if self._file is not None:
            self._file.close()
