"""Files of one record a line: JSONL and plain text. A range of bytes owns the lines that begin in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import orjson

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Keys, Record, Rejected, checked_text, with_prompt
from pipeline.data.streams import Stream

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
