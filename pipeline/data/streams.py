"""Files of text as one flat run of bytes, whatever they are compressed with, readable from any offset."""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import zstandard

Fault = Literal["truncated_file", "corrupt_file"]

_READ = 1 << 20
# Decompressors are fed in slices so small that even a bomb (zstd: 128 KiB from 4 bytes) comes out in bounded pieces.
_SLICE = 2 << 10
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}
_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError)


class Stream(Protocol):
    """A run of bytes. `fault` is set once reading has met the place where the file is damaged: the run ends there."""

    fault: Fault | None

    def read_at(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on; none at the end."""
        ...


def open_stream(path: Path) -> Stream:
    """The text of `path`, decompressed where its name says so (.gz, .zst, .xz)."""
    if path.suffix in _DECOMPRESSORS:
        return DecompressedStream(path)
    return PlainStream(path)


def is_compressed(path: Path) -> bool:
    """Whether offsets in `path` are those of the decompressed text, so that reaching one means reading up to it."""
    return path.suffix in _DECOMPRESSORS


class PlainStream:
    """An uncompressed file."""

    fault: Fault | None = None

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)


class DecompressedStream:
    """A compressed file. Reading forward is cheap; reading back beyond the last mebibyte starts from the beginning.

    A file cut short, or damaged in its middle, gives everything up to there and then sets `fault`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault: Fault | None = None
        self._restart()

    def _restart(self) -> None:
        self._pieces = self._decompressed()
        self._window = b""
        self._window_start = 0

    def read_at(self, offset: int, size: int) -> bytes:
        if offset < self._window_start:
            self._restart()
        while offset >= self._window_start + len(self._window):
            piece = next(self._pieces, b"")
            if not piece:
                return b""
            kept = self._window[-_READ:]
            self._window_start += len(self._window) - len(kept)
            self._window = kept + piece
        at = offset - self._window_start
        return self._window[at : at + size]

    def _decompressed(self) -> Iterator[bytes]:
        """The text in pieces of about a mebibyte; several members or frames in a row are one text."""
        pending: list[bytes] = []
        pending_bytes = 0
        for piece in self._small_pieces():
            pending.append(piece)
            pending_bytes += len(piece)
            if pending_bytes >= _READ:
                yield b"".join(pending)
                pending, pending_bytes = [], 0
        yield b"".join(pending)

    def _small_pieces(self) -> Iterator[bytes]:
        new = _DECOMPRESSORS[self.path.suffix]
        decompressor = new()
        whole = True
        with self.path.open("rb") as file:
            while raw := file.read(_READ):
                for at in range(0, len(raw), _SLICE):
                    data = raw[at : at + _SLICE]
                    while data:
                        if decompressor.eof:
                            decompressor = new()
                        try:
                            yield decompressor.decompress(data)
                        except _DAMAGE:
                            self.fault = "corrupt_file"
                            return
                        whole = decompressor.eof
                        data = decompressor.unused_data if whole else b""
        if not whole:
            self.fault = "truncated_file"


def text_length(path: Path) -> int:
    """How many bytes of text a file gives: its size, or, compressed, what it decompresses to up to the first damage."""
    if not is_compressed(path):
        return path.stat().st_size
    stream = DecompressedStream(path)
    return sum(len(piece) for piece in stream._decompressed())
