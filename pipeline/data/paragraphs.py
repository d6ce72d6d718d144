"""Text files whose documents are not lines: whole files, or what blank lines separate."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Record, Rejected
from pipeline.data.text_files import BYTE_ORDER_MARK, Line, Stream, first_line_start, lines, record_of

_LOOK_BACK_BYTES = 64 * 2**10
_BLANK = b" \t\r\v\f"


def file_record(stream: Stream) -> Iterator[Record]:
    """The whole file as one document; it is held in memory, so that one beyond MAX_RECORD_BYTES is rejected."""
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_RECORD_BYTES and (block := stream.read_at(size, MAX_RECORD_BYTES + 1 - size)):
        pieces.append(block)
        size += len(block)
    yield _record(stream, 0, pieces, size, ended=False)


def paragraph_records(stream: Stream, start: int, stop: int) -> Iterator[Record]:
    """The documents that begin in [start, stop), separated by lines of white space, in memory for one of them."""
    pieces: list[bytes] = []
    offset, size = 0, 0
    is_between = _follows_blank(stream, first_line_start(stream, start, stop))
    for line in lines(stream, start, sys.maxsize):
        if line.content and line.content.strip():
            if not size and (not is_between or line.offset >= stop):
                if line.offset >= stop:
                    return
                continue  # the rest of a document that begins before
            offset = offset if size else line.offset
            size += line.size + 1
            pieces += [line.content, b"\n"]
            if size > MAX_RECORD_BYTES:
                del pieces[1:]
            continue
        is_between = True
        if size:
            yield _record(stream, offset, pieces, size, ended=True)
            pieces, size = [], 0
        if line.offset >= stop:
            return
    if size:
        yield _record(stream, offset, pieces, size, ended=False)
    elif stream.fault and not stream.read_at(stop, 1):
        yield Rejected(stop, stream.fault, b"")


def _record(stream: Stream, offset: int, pieces: list[bytes], size: int, *, ended: bool) -> Record:
    text = b"".join(pieces).removeprefix(BYTE_ORDER_MARK)
    if stream.fault and not ended:
        return Rejected(offset, stream.fault, text[:EXCERPT_BYTES])
    return record_of(Line(offset, text.replace(b"\r\n", b"\n").rstrip(b"\r\n"), size), None)


def _follows_blank(stream: Stream, offset: int) -> bool:
    """Whether the line before the one that begins at `offset` is blank, or there is none."""
    position = offset - 1  # the end of the line before
    while position > 0:
        first = max(0, position - _LOOK_BACK_BYTES)
        if rest := stream.read_at(first, position - first).rstrip(_BLANK):
            return rest.endswith(b"\n")
        position = first
    return True
