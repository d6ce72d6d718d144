"""The records in files of text, by their format. Tables in Parquet and Arrow are in `columns`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.sources.csv_tables import csv_records
from pipeline.data.sources.json_records import (
    array_records,
    json_records,
    object_records,
    plain_document,
)
from pipeline.data.sources.lines import BYTE_ORDER_MARK, Line, lines, whole_file
from pipeline.data.sources.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    Keys,
    Record,
    Rejected,
    record_of,
)
from pipeline.data.sources.streams import Stream


def text_records(stream: Stream, kind: str, start: int, stop: int, keys: Keys) -> Iterator[Record]:
    """The records that begin in the bytes [start, stop) of a file; of a `kind` that is not read by
    lines all of them.

    Where the stream is damaged, the incomplete last record is rejected with the fault as reason.
    """
    if kind == "json_array":
        return array_records(stream, keys)
    if kind == "json_objects":
        return object_records(stream, keys)
    if kind in ("csv", "tsv"):
        return csv_records(stream, keys, kind)
    return _line_records(stream, start, stop, keys, kind)


def _line_records(stream: Stream, start: int, stop: int, keys: Keys, kind: str) -> Iterator[Record]:
    incomplete: Line | None = None
    end = b"\r" if kind == "text_cr" else b"\n"
    found = lines(stream, start, stop, end)
    if keys.document == "file":
        found = whole_file(stream, start)
    # A record of one string under a key is by far the most frequent, and has a short way.
    is_plain = kind == "jsonl" and keys.prompt is None and keys.chat is None
    for line in found:
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            incomplete = line
            continue
        # A file that others were appended to has a byte-order mark in its middle, too.
        content = line.content.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r")
        if line.size > MAX_RECORD_BYTES:
            yield Rejected(line.offset, "too_large", content[:EXCERPT_BYTES], size=line.size)
            continue
        if not content or content.isspace():
            continue
        if kind != "jsonl":
            yield record_of(line.offset, content)
            continue
        document = plain_document(content, keys.text) if is_plain else None
        if document is not None:
            yield document
        else:
            yield from _with_size(json_records(line.offset, content, keys), line.size)
    if not stream.read_at(stop, 1) and stream.fault:
        if incomplete is None:
            yield Rejected(stop, stream.fault, b"")
        else:
            excerpt = incomplete.content[:EXCERPT_BYTES]
            yield Rejected(incomplete.offset, stream.fault, excerpt, size=incomplete.size)


def _with_size(records: Iterator[Record], size: int) -> Iterator[Record]:
    """The records of a line, of which rejected ones have its size where they know no better."""
    for record in records:
        if isinstance(record, Rejected) and record.size is None:
            record = record._replace(size=size)
        yield record
