"""The text of files as bytes of UTF-8, from any offset: plain, compressed (.gz, .zst, .xz) or of
another encoding."""

from __future__ import annotations

import codecs
import lzma
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, takewhile
from typing import Any, BinaryIO, Literal

import charset_normalizer
import zstandard

from pipeline.data.sources.object_stores import InputPath, RemoteFile
from pipeline.errors import DataError

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}
COMPRESSIONS = tuple(_DECOMPRESSORS)
# How compressed files begin.
_MAGIC: dict[str, tuple[bytes, ...]] = {
    ".gz": (b"\x1f\x8b",),
    ".xz": (b"\xfd7zXZ\x00",),
    # A frame, or one to skip, which pzstd and the seekable format write.
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))),
    ".bz2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    ".zip": (b"PK\x03\x04",),
}
_MAGIC_BYTES = 10
# A multiple of so many zeros may follow a stream of .xz (the .xz file format, section 2.2).
_XZ_PADDING = 4
Fault = Literal["truncated_file", "corrupt_file"]
_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError)
# Small, because what a damaged slice held before the damage is lost, too.
_SLICE_BYTES = 4 << 10
_SLICES = 256
_SAMPLE_BYTES = 64 << 10
# Of the text before, so that a reader can go back a little.
_KEPT_BYTES = 1 << 20
# Their text is UTF-8 by definition.
_TABLES = (".parquet", ".arrow")


def _as_lone_surrogate(error: UnicodeError) -> tuple[str, int]:
    """Stands for bytes that an encoding does not have.

    A lone surrogate is not UTF-8: the record that holds the bytes is rejected, the others are read.
    """
    assert isinstance(error, UnicodeDecodeError)
    return "\ud800", error.end


codecs.register_error("lone_surrogate", _as_lone_surrogate)


class Stream:
    """The bytes of a plain file.

    `fault` is set once reading has reached a damaged place; the stream ends there.
    """

    fault: Fault | None = None

    def __init__(self, path: InputPath) -> None:
        self.path = path
        self._remote: BinaryIO | None = None
        if isinstance(path, RemoteFile):
            self._remote = path.open()
            weakref.finalize(self, self._remote.close)
        else:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)

    def read_at(self, offset: int, size: int) -> bytes:
        """At most `size` bytes of text from `offset` on; none at the end."""
        return self._stored_at(offset, size)

    def _stored_at(self, offset: int, size: int) -> bytes:
        """At most `size` bytes of the file from `offset` on, as they are stored."""
        if self._remote is None:
            # pread has no position that readers of one descriptor would share.
            return os.pread(self._descriptor, size, offset)
        self._remote.seek(offset)
        return self._remote.read(size)


class DecodedStream(Stream):
    """The text of a file that is compressed, or of another encoding. Reading back by more than a
    mebibyte starts again.

    A file that is truncated, or damaged in the middle, yields everything before that place and then
    sets `fault`.
    """

    def __init__(self, path: InputPath, encoding: str | None) -> None:
        super().__init__(path)
        self._encoding = encoding
        self._start_again()

    def _start_again(self) -> None:
        self._pieces = self.pieces()
        self._window = b""
        self._window_start = 0

    def read_at(self, offset: int, size: int) -> bytes:
        # A decompressor cannot go back: what is before the window is read from the beginning.
        if offset < self._window_start:
            self._start_again()
        while offset >= self._window_start + len(self._window):
            pieces = list(islice(self._pieces, _SLICES))
            if not pieces:
                return b""
            # Compressed text can only be read forwards: going back within the window costs nothing,
            # further back everything.
            kept = self._window[-_KEPT_BYTES:]
            self._window_start += len(self._window) - len(kept)
            self._window = b"".join([kept, *pieces])
        at = offset - self._window_start
        return self._window[at : at + size]

    def pieces(self) -> Iterator[bytes]:
        """The whole text from its beginning, in pieces."""
        if self._encoding is None:
            yield from self._decompressed()
            return
        # Incremental, because a piece may end within a character.
        decoder = codecs.getincrementaldecoder(self._encoding)("lone_surrogate")
        for piece in self._decompressed():
            try:
                text = decoder.decode(piece)
            except UnicodeError as error:
                # Bytes that an encoding does not have are handled: this is about the whole file.
                fault = self._fault_of_encoding(self._encoding, error)
                raise fault from None
            yield text.encode(errors="surrogatepass")
        yield decoder.decode(b"", final=True).encode(errors="surrogatepass")

    def _fault_of_encoding(self, encoding: str, error: UnicodeError) -> DataError:
        """The error about a file that lacks what its encoding begins with: a byte-order mark."""
        likely = likely_encoding(self.path)
        if likely is None:
            name = codecs.lookup(encoding).name
            advice = (
                f"set the encoding that names the byte order, {name}-le or {name}-be (--encoding), "
                "or leave the setting out if the file is UTF-8"
            )
        else:
            advice = f"it is likely {likely}: set `encoding: {likely}` for the corpus (--encoding)"
        return DataError(f"{self.path}: cannot be read as {encoding} ({error}); {advice}")

    def _decompressed(self) -> Iterator[bytes]:
        """What each piece of the file decompresses to; members or frames in a row are one text."""
        slices = (self._stored_at(offset, _SLICE_BYTES) for offset in count(0, _SLICE_BYTES))
        stored = takewhile(bool, slices)
        suffix = self.path.suffix.lower()
        new_decompressor = _DECOMPRESSORS.get(suffix)
        if new_decompressor is None:
            yield from stored
            return
        decompressor = new_decompressor()
        complete = True
        zeros = 0  # behind a member
        for piece in stored:
            data = piece
            while data:
                # Zeros between members are passed over, as gzip -dc and xz -dc do. zstd -dc refuses
                # them, and so does this.
                if decompressor.eof and suffix != ".zst":
                    rest = data.lstrip(b"\0")
                    zeros += len(data) - len(rest)
                    data = rest
                    if not data:
                        break
                if suffix == ".xz" and zeros % _XZ_PADDING:
                    self.fault = "corrupt_file"
                    return
                zeros = 0
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
        elif suffix == ".xz" and zeros % _XZ_PADDING:
            self.fault = "corrupt_file"


def open_stream(path: InputPath, encoding: str | None = None) -> Stream:
    """The text of `path`, decompressed if its name ends in .gz, .zst or .xz.

    Raises:
        DataError: for an encoding that is unknown or not of text, and where the file is not
            compressed as its name says.
    """
    is_plain = encoding is None or _is_utf8(path, encoding)
    plain = Stream(path)
    _check_compression(path, plain.read_at(0, _MAGIC_BYTES))
    if is_plain and path.suffix.lower() not in _DECOMPRESSORS:
        return plain
    return DecodedStream(path, None if is_plain else encoding)


def _is_utf8(path: InputPath, encoding: str) -> bool:
    """Whether an encoding, which is to read `path`, is UTF-8.

    Raises:
        DataError: Python has no such encoding, or one that text cannot be read in.
    """
    advice = "name one of Python's for text, such as cp949"
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError):
        # A ValueError is about the name itself, such as a NUL in it.
        raise DataError(f"{path}: unknown encoding {encoding!r}; {advice}") from None
    try:
        # Codecs between bytes, such as base64, and those without error handlers, such as punycode,
        # say so only when they are used.
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)("lone_surrogate").decode(b"", final=True)
    except (LookupError, ValueError):
        raise DataError(
            f"{path}: expected an encoding of text files, found {encoding!r}; {advice}"
        ) from None
    return name == "utf-8"


def _check_compression(path: InputPath, beginning: bytes) -> None:
    """Compares the compression that a file's name says with its first bytes.

    Raises:
        DataError: they differ.
    """
    suffix = path.suffix.lower()
    named = suffix if suffix in _DECOMPRESSORS else ""
    found = next((kind for kind, magic in _MAGIC.items() if beginning.startswith(magic)), "")
    if found == named or not beginning:
        return
    if found in _DECOMPRESSORS:
        advice = f"rename it so that it ends in {found}"
    elif found:
        advice = "decompress it first"
    else:
        advice = f"rename it without {named} if it is plain text, or copy it again if it is damaged"
    expected = f"a file compressed as {named}" if named else "a file that is not compressed"
    raise DataError(
        f"{path}: expected {expected} by its name, found {found or 'other bytes'}; {advice}"
    )


def text_length(path: InputPath, encoding: str | None = None) -> tuple[int, Fault | None]:
    """The bytes of text in a file, its size or what it decodes to before any damage; and that
    damage."""
    stream = open_stream(path, encoding)
    if not isinstance(stream, DecodedStream):
        return path.stat().st_size, None
    size = sum(map(len, stream.pieces()))
    return size, stream.fault


def text_per_byte(path: InputPath) -> float:
    """About how many bytes of text a byte of the file holds, from its first mebibyte; 1 if it is
    not compressed."""
    new_decompressor = _DECOMPRESSORS.get(path.suffix.lower())
    if new_decompressor is None:
        return 1.0
    with path.open("rb") as file:
        stored = file.read(_KEPT_BYTES)
    try:
        text = new_decompressor().decompress(stored)
    except _DAMAGE:
        # Reading it will say so.
        return 1.0
    return max(1.0, len(text) / max(1, len(stored)))


def encoding_advice(paths: Iterable[InputPath]) -> str | None:
    """What to do about the first file that is likely of another encoding than UTF-8; None where
    there is none."""
    for path in paths:
        name = likely_encoding(path)
        if name is not None:
            return (
                f"{path} is likely {name}, not UTF-8: set `encoding: {name}` for the corpus "
                f"(--encoding), or convert it with `iconv -f {name} -t utf-8`, and remove "
                "the output folder"
            )
    return None


def likely_encoding(path: InputPath) -> str | None:
    """The encoding that a file of text likely has, as Python names it; None for UTF-8, damaged or
    not."""
    if path.suffix.lower() in _TABLES:
        return None
    sample = open_stream(path).read_at(0, _SAMPLE_BYTES)
    text = sample.decode(errors="replace")
    # A damaged file of UTF-8 has few replaced characters, less than 1 in 50. A NUL tells of UTF-16.
    if "\0" not in text and text.count("\ufffd") * 50 < len(text):
        return None
    likely = charset_normalizer.from_bytes(sample).best()
    if likely is None:
        # A character may be cut at the end of the sample: try whole lines.
        whole_lines = sample[: sample.rfind(b"\n") + 1]
        likely = charset_normalizer.from_bytes(whole_lines).best()
    if likely is None:
        return None
    return likely.encoding.replace("_", "-")
