"""The lines of a text, from any offset, and the beginning of a text, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.data.sources.records import EXCERPT_BYTES, MAX_RECORD_BYTES
from pipeline.data.sources.streams import Stream

BLOCK_BYTES = 4 << 20
# Past the end of a range only the rest of one document is needed, and going back in a compressed
# file is slow.
_BLOCK_BYTES_PAST_END = 64 << 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line without its line end, or a whole file. Beyond MAX_RECORD_BYTES `content` may lack
    bytes after its beginning; `lost_quotes` of these are quotation marks."""

    offset: int
    content: bytes
    size: int
    lost_quotes: int = 0


def lines(stream: Stream, start: int, stop: int, end: bytes = b"\n") -> Iterator[Line]:
    """The lines that begin in [start, stop), each ended by the byte `end`."""
    offset = _first_line_start(stream, start, stop, end)
    position = offset
    # Of the line at `offset`, whose end has not been read.
    parts: list[bytes] = []
    size = lost_quotes = 0
    while offset < stop:
        wanted = min(BLOCK_BYTES, stop - position) if position < stop else _BLOCK_BYTES_PAST_END
        block = stream.read_at(position, wanted)
        if not block:
            break
        position += len(block)
        ended = block.split(end)
        rest = ended.pop()
        for content in ended:
            size += len(content)
            if parts:
                content = b"".join([*parts, content])
                parts = []
            yield Line(offset, content, size, lost_quotes)
            offset += size + 1
            size = lost_quotes = 0
            if offset >= stop:
                return
        parts.append(rest)
        size += len(rest)
        if size > MAX_RECORD_BYTES:
            # It will be rejected. Only its beginning is kept, so that memory stays bounded.
            known = b"".join(parts)
            lost_quotes += known.count(b'"', EXCERPT_BYTES)
            parts = [known[:EXCERPT_BYTES]]
    if size:
        yield Line(offset, b"".join(parts), size, lost_quotes)


def line_end(stream: Stream) -> bytes:
    """The byte that ends the lines of a text: a line feed, or the carriage return of old Macs and
    spreadsheets."""
    block = stream.read_at(0, BLOCK_BYTES)
    return b"\r" if b"\r" in block and b"\n" not in block else b"\n"


def _first_line_start(stream: Stream, start: int, stop: int, end: bytes) -> int:
    """Where the first line that begins in [start, stop) begins; `stop` if none does."""
    if start == 0:
        return 0
    # The line that contains the byte before `start` belongs to the range before, even if that byte
    # is its end: then the first line begins at `start`.
    # A line that begins exactly at `start` is ours: the byte before it is then a line end.
    position = start - 1
    while position < stop:
        block = stream.read_at(position, min(BLOCK_BYTES, stop - position))
        if not block:
            break
        found = block.find(end)
        if found >= 0:
            return position + found + 1
        position += len(block)
    return stop


def whole_file(stream: Stream, start: int) -> Iterator[Line]:
    """The text of a file as one line, with line feeds as on Unix and none at its end."""
    content = beginning(stream, MAX_RECORD_BYTES)
    yield Line(start, content.replace(b"\r\n", b"\n").rstrip(b"\n"), len(content))


def beginning(stream: Stream, most: int) -> bytes:
    """The content of `stream`, or a little more than `most` bytes of it."""
    content = bytearray()
    while len(content) <= most:
        block = stream.read_at(len(content), BLOCK_BYTES)
        if not block:
            break
        content += block
    return bytes(content)
