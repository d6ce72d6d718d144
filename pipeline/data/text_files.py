"""Reading text files, plain or compressed (.gz, .zst, .xz), from any offset, and the records in their lines."""

from __future__ import annotations

import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import zstandard

from pipeline.data.input_checks import input_size, open_input, refuse_bomb
from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Keys, Record, Rejected, checked_text, with_prompt
from pipeline.errors import DataError

Fault = Literal["truncated_file", "corrupt_file"]

_PIECE_BYTES = 1 << 20
# Decompressors get slices this small, so that even a decompression bomb (zstd: 128 KiB from 4 bytes) comes out in
# bounded pieces.
_SLICE_BYTES = 2 << 10
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=2**30),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}
_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError)

_BLOCK_BYTES = 4 << 20
# Past the end of a range only the rest of one line is needed, and going back in a compressed file is slow.
_BLOCK_BYTES_PAST_END = 64 << 10
_BLANK_LINES = re.compile(rb"\s*\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_KEYS = 20


class Stream:
    """The bytes of an uncompressed file.

    `fault` is set once reading has reached a damaged place; the stream ends there.
    """

    fault: Fault | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_input(path)

    def read_at(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on; none at the end.

        Raises:
            DataError: the disk fails.
        """
        try:
            return os.pread(self._file.fileno(), size, offset)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); copy it again") from None


class DecompressedStream(Stream):
    """The decompressed bytes of a file. Reading back by more than a mebibyte starts again from the beginning.

    A file that is truncated, or damaged in the middle, yields everything before that place and then sets `fault`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart()

    def _restart(self) -> None:
        self._pieces = self.pieces()
        self._window = b""
        self._window_start = 0

    def read_at(self, offset: int, size: int) -> bytes:
        if offset < self._window_start:
            self._restart()
        while offset >= self._window_start + len(self._window):
            piece = next(self._pieces, b"")
            if not piece:
                return b""
            kept = self._window[-_PIECE_BYTES:]
            self._window_start += len(self._window) - len(kept)
            self._window = kept + piece
        at = offset - self._window_start
        return self._window[at : at + size]

    def pieces(self) -> Iterator[bytes]:
        """The whole text from its beginning, in pieces of about a mebibyte.

        Raises:
            DataError: there is far more of it than of the file.
        """
        produced = 0
        pending: list[bytes] = []
        pending_bytes = 0
        for piece in self._small_pieces():
            pending.append(piece)
            pending_bytes += len(piece)
            if pending_bytes >= _PIECE_BYTES:
                produced += pending_bytes
                refuse_bomb(self.path, produced)
                yield b"".join(pending)
                pending, pending_bytes = [], 0
        yield b"".join(pending)

    def _small_pieces(self) -> Iterator[bytes]:
        """What each slice of the file decompresses to. Consecutive members or frames form one text."""
        new_decompressor = _DECOMPRESSORS[self.path.suffix]
        decompressor = new_decompressor()
        complete = True
        with open_input(self.path) as file:
            while raw := file.read(_PIECE_BYTES):
                for at in range(0, len(raw), _SLICE_BYTES):
                    data = raw[at : at + _SLICE_BYTES]
                    while data:
                        if decompressor.eof:
                            decompressor = new_decompressor()
                        try:
                            yield decompressor.decompress(data)
                        except _DAMAGE:
                            self.fault = "corrupt_file"
                            return
                        complete = decompressor.eof
                        data = decompressor.unused_data if complete else b""
        if not complete:
            self.fault = "truncated_file"


def open_stream(path: Path) -> Stream:
    """The text of `path`, decompressed if its name ends in .gz, .zst or .xz."""
    return DecompressedStream(path) if path.suffix in _DECOMPRESSORS else Stream(path)


def text_length(path: Path) -> int:
    """The bytes of text in a file: its size, or, if compressed, what it decompresses to before any damage."""
    if path.suffix not in _DECOMPRESSORS:
        return input_size(path)
    return sum(map(len, DecompressedStream(path).pieces()))


class Line(NamedTuple):
    """A line without its line end. Of a line longer than MAX_RECORD_BYTES, `content` may hold only the beginning."""

    offset: int
    content: bytes
    size: int


def lines(stream: Stream, start: int, stop: int, *, skip_blank: bool = False) -> Iterator[Line]:
    """The lines that begin in the bytes [start, stop), in bounded memory however long a line is.

    `skip_blank`: most lines of white space are left out, and quickly.
    """
    offset = position = first_line_start(stream, start, stop)
    pieces: list[bytes] = []  # of the line at `offset`, whose end has not been read
    size = 0
    while offset < stop:
        block = stream.read_at(
            position, min(_BLOCK_BYTES, stop - position) if position < stop else _BLOCK_BYTES_PAST_END
        )
        if not block:
            break
        position += len(block)
        at = 0
        while True:
            if skip_blank and size == 0 and (blank := _BLANK_LINES.match(block, at)):
                offset += blank.end() - at
                at = blank.end()
            end = block.find(b"\n", at)
            if end < 0:
                break
            piece = block[at:end]
            size += len(piece)
            yield Line(offset, b"".join([*pieces, piece]), size)
            offset += size + 1
            at = end + 1
            pieces, size = [], 0
            if offset >= stop:
                return
        pieces.append(block[at:])
        size += len(block) - at
        if size > MAX_RECORD_BYTES:
            pieces = [b"".join(pieces)[:EXCERPT_BYTES]]
    if size:
        yield Line(offset, b"".join(pieces), size)


def first_line_start(stream: Stream, start: int, stop: int) -> int:
    """Where the first line that begins in [start, stop) begins; `stop` if none does."""
    if start == 0:
        return 0
    position = start - 1  # the line that contains this byte belongs to the range before
    while position < stop and (block := stream.read_at(position, min(_BLOCK_BYTES, stop - position))):
        if (found := block.find(b"\n")) >= 0:
            return position + found + 1
        position += len(block)
    return stop


def line_records(stream: Stream, start: int, stop: int, *, keys: Keys | None) -> Iterator[Record]:
    """The records of the lines that begin in [start, stop): JSON objects with `keys`, or (None) each line as text.

    Blank lines are skipped. Where the stream is damaged, the incomplete last line is rejected with the fault as reason.
    """
    incomplete: Line | None = None
    for line in lines(stream, start, stop, skip_blank=True):
        if stream.fault and not stream.read_at(line.offset + line.size, 1):
            incomplete = line
            continue
        # A file that others were appended to has a byte-order mark in its middle, too.
        content = line.content.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r")
        if content and not content.isspace():
            yield from records_of(Line(line.offset, content, line.size), keys)
    if not stream.read_at(stop, 1) and stream.fault:
        if incomplete is None:
            yield Rejected(stop, stream.fault, b"")
        else:
            yield Rejected(incomplete.offset, stream.fault, incomplete.content[:EXCERPT_BYTES])


def records_of(line: Line, keys: Keys | None) -> Iterator[Record]:
    """The records in a line: one, or of a chat one for each answer."""
    if keys is None or keys.chat is None or line.size > MAX_RECORD_BYTES:
        yield record_of(line, keys)
        return
    try:
        value = orjson.loads(line.content)
    except orjson.JSONDecodeError:
        yield record_of(line, keys)
        return
    if isinstance(value, dict) and keys.text in value:
        yield from keys.chat.records(line.offset, value[keys.text])
    else:
        yield record_of(line, keys)


def record_of(line: Line, keys: Keys | None) -> Record:
    """The record in a line: a JSON object with `keys`, or (None) its text."""
    excerpt = line.content[:EXCERPT_BYTES]
    if line.size > MAX_RECORD_BYTES:
        return Rejected(line.offset, "too_large", excerpt)
    try:
        value = line.content.decode() if keys is None else orjson.loads(line.content)
    except UnicodeDecodeError:
        return Rejected(line.offset, "invalid_utf8", excerpt)
    except orjson.JSONDecodeError:
        return Rejected(line.offset, "malformed_json" if _is_utf8(line.content) else "invalid_utf8", excerpt)
    if keys is None:
        return checked_text(line.offset, value)
    if not isinstance(value, dict):
        return Rejected(line.offset, "not_an_object", excerpt)
    if keys.text not in value:
        return Rejected(line.offset, "no_text_key", _names(value))
    document = checked_text(line.offset, value[keys.text])
    if keys.prompt is None:
        return document
    if keys.prompt not in value:
        return Rejected(line.offset, "no_prompt_key", _names(value))
    return with_prompt(line.offset, document, value[keys.prompt])


def _names(value: dict[str, Any]) -> bytes:
    return f"its keys: {', '.join(islice(value, _SHOWN_KEYS))}".encode()[:EXCERPT_BYTES]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
