"""Reading a JSON file that is one array of records, such as LLaMA-Factory's, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Keys, Record, Rejected
from pipeline.data.text_files import BYTE_ORDER_MARK, Line, Stream, records_of

_BLOCK_BYTES = 256 << 10
# Outside of strings only these matter: where a string begins, how deep it is, and where an element ends.
_STRUCTURE = re.compile(rb'["\[\]{},]')
_REST_OF_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_ARRAY_START = re.compile(rb"(?:%s)?\s*\[" % BYTE_ORDER_MARK)


def begins_array(stream: Stream) -> bool:
    """Whether the text of `stream` begins as a JSON array does."""
    return _ARRAY_START.match(stream.read_at(0, _BLOCK_BYTES)) is not None


def array_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of the array that `stream` holds; the last is a rejected one if the array does not end well."""
    opening = _ARRAY_START.match(stream.read_at(0, _BLOCK_BYTES))
    window, base = b"", opening.end() if opening else 0  # some bytes of the file, and where they begin in it
    start = at = 0  # in the window: where the element begins, and how far it has been scanned
    dropped, head = 0, b""  # of an element that is too large: how much of it is not in the window, and its beginning
    depth, in_string, is_open = 0, False, True
    while is_open:
        if in_string:
            at = _REST_OF_STRING.match(window, at).end()  # type: ignore[union-attr]  # it matches an empty string
            if window[at : at + 1] == b'"':
                in_string = False
                at += 1
                continue
        elif found := _STRUCTURE.search(window, at):
            at = found.end()
            if found[0] == b'"':
                in_string = True
            elif found[0] in (b"[", b"{"):
                depth += 1
            elif depth and found[0] != b",":
                depth -= 1
            elif not depth:
                content = (head + window[start : found.start()]).strip()
                if content:
                    yield from records_of(Line(base + start - dropped, content, dropped + len(content)), keys)
                start, dropped, head = at, 0, b""
                is_open = found[0] == b","
            continue
        else:
            at = len(window)
        block = stream.read_at(base + len(window), _BLOCK_BYTES)
        if not block:
            excerpt = (head + window[start:])[:EXCERPT_BYTES]
            yield Rejected(base + start - dropped, stream.fault or "malformed_json", excerpt)
            return
        if at - start > MAX_RECORD_BYTES:
            head = head or window[start : start + EXCERPT_BYTES]
            dropped += at - start
            start = at
        window, base = window[start:] + block, base + start
        start, at = 0, at - start
    rest = window[at:] + stream.read_at(base + len(window), _BLOCK_BYTES)
    if rest.strip():
        yield Rejected(base + at, stream.fault or "malformed_json", rest[:EXCERPT_BYTES])
