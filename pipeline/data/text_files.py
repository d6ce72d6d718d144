"""Files of text as one flat run of bytes, whatever they are compressed with, readable from any offset."""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import orjson
import zstandard

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Keys, Record, Rejected, checked_text, with_prompt

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


# --- Files of one record a line: JSONL and plain text. A range of bytes owns the lines that begin in it -------------

_BLOCK = 4 << 20
# Past the end of a range only the rest of one line is wanted, and a compressed stream does not like to go back.
_BLOCK_PAST_END = 64 << 10


class Line(NamedTuple):
    """A line without its end. `size` exceeds `len(content)` where the line was too long to keep whole."""

    offset: int
    content: bytes
    size: int


class _OpenLine:
    """A line of which the end has not been read yet. Beyond `limit` only its beginning is kept."""

    def __init__(self, offset: int, limit: int) -> None:
        self._offset = offset
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    def extend(self, piece: bytes) -> None:
        """Goes on with `piece`."""
        fitted = self._size <= self._limit
        self._size += len(piece)
        if fitted:
            self._pieces.append(piece)
            if self._size > self._limit:
                self._pieces = [b"".join(self._pieces)[:EXCERPT_BYTES]]

    def end(self) -> Line:
        """The line, now that its end is known."""
        return Line(self._offset, b"".join(self._pieces), self._size)


def lines(stream: Stream, start: int, stop: int, *, limit: int = MAX_RECORD_BYTES) -> Iterator[Line]:
    """The lines that begin in the bytes [start, stop), in memory bounded by `limit` whatever their length."""
    skip = start > 0  # the line that covers byte start - 1 belongs to the range before
    at = start - 1 if skip else 0
    if at >= stop:
        return
    line = _OpenLine(at, 0 if skip else limit)
    while block := stream.read_at(at, min(_BLOCK, stop - at) if at < stop else _BLOCK_PAST_END):
        at += len(block)
        first, *rest = block.split(b"\n")
        line.extend(first)
        if not rest:
            if skip and at >= stop:
                return  # nothing begins in the range: one long line covers it
            continue
        if not skip:
            yield line.end()
        skip = False
        *whole, last = rest
        offset = at - sum(map(len, rest)) - len(whole)
        for content in whole:
            if offset >= stop:
                return
            yield Line(offset, content, len(content))
            offset += len(content) + 1
        if offset >= stop:
            return
        line = _OpenLine(offset, limit)
        line.extend(last)
    final = line.end()
    if final.size and not skip:
        yield final


def line_records(stream: Stream, start: int, stop: int, *, keys: Keys | None) -> Iterator[Record]:
    """The records of the lines that begin in [start, stop): JSON objects with `keys`, or (None) each line as it is.

    Blank lines are no records. Where the stream is damaged, its last, cut line is one, with the damage as its reason.
    """
    cut: Line | None = None
    for line in lines(stream, start, stop):
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            cut = line
        elif line.content and not line.content.isspace():
            yield _record(line, keys)
    if not stream.read_at(stop, 1) and stream.fault:
        yield Rejected(cut.offset if cut else stop, stream.fault, cut.content[:EXCERPT_BYTES] if cut else b"")


def _record(line: Line, keys: Keys | None) -> Record:
    excerpt = line.content[:EXCERPT_BYTES]
    if line.size > MAX_RECORD_BYTES:
        return Rejected(line.offset, "too_large", excerpt)
    if keys is None:
        try:
            return checked_text(line.offset, line.content.decode())
        except UnicodeDecodeError:
            return Rejected(line.offset, "invalid_utf8", excerpt)
    try:
        value = orjson.loads(line.content)
    except orjson.JSONDecodeError:
        return Rejected(line.offset, "malformed_json" if _is_utf8(line.content) else "invalid_utf8", excerpt)
    if not isinstance(value, dict):
        return Rejected(line.offset, "not_an_object", excerpt)
    if keys.text not in value:
        return Rejected(line.offset, "no_text_key", excerpt)
    document = checked_text(line.offset, value[keys.text])
    if keys.prompt is None:
        return document
    if keys.prompt not in value:
        return Rejected(line.offset, "no_prompt_key", excerpt)
    return with_prompt(line.offset, document, value[keys.prompt])


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
