"""The records in JSON: an object a line, one array of all records, or objects that follow each
other."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from typing import cast

import orjson

from pipeline.data.sources.lines import BLOCK_BYTES, BYTE_ORDER_MARK, beginning
from pipeline.data.sources.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    Document,
    Keys,
    Reason,
    Record,
    Rejected,
    beside_chat,
    record_of,
    value_at,
)
from pipeline.data.sources.streams import Stream
from pipeline.errors import DataError

_SHOWN_KEYS = 20
_ARRAY_START = re.compile(rb"(?:%s)?\s*\[" % BYTE_ORDER_MARK)
# Reads what orjson does not: NaN, and lone surrogates, which do no harm outside the text.
_JSON = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def plain_document(content: bytes, key: str) -> Document | None:
    """The document in a line that is an object of JSON with a usable text under `key`.

    None for every other line, of which `json_records` says what it is.
    """
    # This is run for nearly every record: one try is faster than a check for each case.
    try:
        text = orjson.loads(content)[key]
        utf8 = text.encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if not utf8 or text.isspace() or b"\0" in utf8 or len(utf8) > MAX_RECORD_BYTES:
        return None
    return Document(text, utf8=utf8)


def json_records(offset: int, content: bytes, keys: Keys) -> Iterator[Record]:
    """The record in a line of JSON, or in each of several objects on it; of a chat one for each
    answer."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        yield from _other_json_records(offset, content, keys, str(error))
    else:
        yield from _records_in(offset, value, keys, content[:EXCERPT_BYTES])


def _other_json_records(offset: int, content: bytes, keys: Keys, reason: str) -> Iterator[Record]:
    """The records of what orjson does not read, for the `reason` that it gives."""
    excerpt = content[:EXCERPT_BYTES]
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield Rejected(offset, "invalid_utf8", excerpt)
        return
    # Several objects on a line happen where line feeds were lost, as in files that were joined.
    values: list[object] = []
    position = _end_of_space(text, 0)
    try:
        while position < len(text):
            value, position = _JSON.raw_decode(text, position)
            values.append(value)
            position = _end_of_space(text, position)
    except (ValueError, RecursionError):
        yield Rejected(offset, "malformed_json", excerpt, reason)
        return
    if len(values) > 1 and not all(isinstance(value, dict) for value in values):
        yield Rejected(offset, "malformed_json", excerpt, reason)
        return
    for value in values:
        yield from _records_in(offset, value, keys, excerpt)


def _end_of_space(text: str, position: int) -> int:
    """Where white space at `position` ends."""
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def _records_in(offset: int, value: object, keys: Keys, excerpt: bytes = b"") -> Iterator[Record]:
    if not isinstance(value, dict):
        shown = excerpt or repr(value)[:EXCERPT_BYTES].encode(errors="replace")
        yield Rejected(
            offset, "not_an_object", shown, f"found {type(value).__name__}, expected an object"
        )
        return
    found: list[object] = []
    for key, reason in zip(keys.all, ("no_text_key", "no_prompt_key"), strict=False):
        try:
            found.append(value_at(value, key))
        except KeyError:
            names = ", ".join(islice(value, _SHOWN_KEYS))
            shown = f"its keys: {names}".encode(errors="backslashreplace")
            yield Rejected(offset, cast("Reason", reason), shown[:EXCERPT_BYTES])
            return
    if keys.chat is not None:
        yield from keys.chat.records(offset, found[0], beside_chat(value, keys))
    else:
        yield record_of(offset, *found)


def begins_array(stream: Stream, *, named_lines: bool = False) -> bool:
    """Whether a file of JSON is an array of all its records.

    `named_lines`: its name says that each line is JSON, so that lines which are arrays by
    themselves are no such array.
    """
    block = stream.read_at(0, BLOCK_BYTES)
    if _ARRAY_START.match(block) is None:
        return False
    first, _, rest = block.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    return not named_lines or not rest.strip() or not _is_json(first)


def begins_objects(stream: Stream) -> bool:
    """Whether a file holds objects of JSON that are not one a line: indented, or all behind each
    other."""
    block = stream.read_at(0, BLOCK_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
    first, line_feed, _ = block.partition(b"\n")
    if not block.startswith(b"{") or _is_json(first):
        return False
    text = block.decode(errors="replace")
    try:
        value, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (not line_feed or "\n" in text[:end])


def _is_json(content: bytes) -> bool:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def array_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of the array that `stream` holds; offsets are their numbers. It is read whole."""
    content = beginning(stream, sys.maxsize).removeprefix(BYTE_ORDER_MARK)
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        try:
            values = _JSON.decode(content.decode().strip())
        except (ValueError, RecursionError):
            what = "not JSON"
            if stream.fault:
                what = "truncated or damaged, and an array cannot be read in part"
            raise DataError(
                f"{stream.path}: {what} ({error}); correct it, or write it as JSONL, an object a "
                "line"
            ) from None
    for number, value in enumerate(values):
        yield from _records_in(number, value, keys)


def object_records(stream: Stream, keys: Keys) -> Iterator[Record]:
    """The records of objects that follow each other, which are read whole; offsets are their
    numbers.

    Behind one that is malformed the next is looked for at a line that begins with a brace.
    """
    text = beginning(stream, sys.maxsize).decode(errors="surrogateescape")
    text = text.replace("\ufeff{", "{")  # of files that were joined
    number = 0
    position = _end_of_space(text, 0)
    while position < len(text):
        try:
            value, end = _JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # Up to 200 characters are at least as many bytes, which may cut the last character.
            excerpt = text[position : position + EXCERPT_BYTES].encode(errors="surrogateescape")
            excerpt = excerpt[:EXCERPT_BYTES]
            following = text.find("\n{", position + 1)
            if following < 0 and stream.fault is not None:
                # The damage cut the last object.
                yield Rejected(number, stream.fault, excerpt)
                return
            yield Rejected(number, "malformed_json", excerpt, str(error))
            end = len(text) if following < 0 else following
        else:
            yield from _records_in(number, value, keys)
        number += 1
        position = _end_of_space(text, end)
    if stream.fault:
        yield Rejected(number, stream.fault, b"")
