"""Beginnings of a corpus's files, in their own formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.config.data import Corpus
from pipeline.data.sources.csv_tables import DEFAULT_QUOTING
from pipeline.data.sources.object_stores import RemoteFile
from pipeline.data.sources.records import Keys
from pipeline.data.sources.streams import COMPRESSIONS, open_stream
from pipeline.data.tokenize.input_files import input_files, is_here, is_text, kind_of
from pipeline.data.tokenize.units import layout_of

_FILES = 4
"""The most files that a sample comes from."""
_ROWS = 256
"""How many rows of a table are read at a time."""
_LINES = ("jsonl", "text", "csv", "tsv")
"""Kinds of files that can be cut behind a line."""


def beginnings(
    inputs: Sequence[str], corpus: Corpus, folder: Path, most_bytes: int
) -> list[str] | None:
    """Writes about `most_bytes` of the first files into `folder`; returns the files that it wrote.

    None if nothing is left out: the inputs are smaller, tokens, or elsewhere than on this machine.
    A file that cannot be cut (JSON arrays, other encodings, documents that are files) is taken
    whole.

    Raises:
        DataError: an input is missing, empty, or of an unknown format.
    """
    if not is_here(inputs) or not is_text(inputs):
        return None
    sizes = input_files(inputs)
    if sum(sizes.values()) <= most_bytes:
        return None
    folder.mkdir(parents=True)
    written: list[str] = []
    left = most_bytes
    for number, file in enumerate(list(sizes)[:_FILES]):
        assert not isinstance(file, RemoteFile), "it is on this machine"
        if left <= 0:
            break
        share = max(1, left // (min(_FILES, len(sizes)) - number))
        kind = kind_of(file)
        is_of_lines = corpus.encoding is None and corpus.document == "line" and kind in _LINES
        if is_of_lines and layout_of(file, kind, Keys()) == kind:
            part = folder / f"{number}.{_plain_name(file)}"
            quoting = corpus.quoting or DEFAULT_QUOTING.get(kind)
            has_quotes = kind in DEFAULT_QUOTING and quoting == "standard"
            part.write_bytes(_first_lines(file, share, has_quotes=has_quotes))
        elif kind == "parquet":
            part = folder / f"{number}.{file.name}"
            _write_first_rows(file, part, share)
        else:
            part = file.resolve()
        written.append(str(part))
        left -= part.stat().st_size
    return written


def _plain_name(file: Path) -> str:
    """The name of a file once it is decompressed."""
    return file.stem if file.suffix.lower() in COMPRESSIONS else file.name


def _first_lines(file: Path, most_bytes: int, *, has_quotes: bool) -> bytes:
    """The first whole lines of a text, decompressed, about `most_bytes` of them; one at least.

    `has_quotes`: it is a table, in which a line feed between quotation marks ends no row.
    """
    stream = open_stream(file)
    content = b""
    while True:
        piece = stream.read_at(len(content), most_bytes)
        if not piece:
            return content
        content += piece
        end = _last_row_end(content) if has_quotes else content.rfind(b"\n")
        if len(content) >= most_bytes and end >= 0:
            return content[: end + 1]


def _last_row_end(content: bytes) -> int:
    """Where the last line feed is that is not between quotation marks; -1: there is none."""
    parts = content.split(b'"')
    stop = len(content)
    for number in reversed(range(len(parts))):
        start = stop - len(parts[number])
        line_feed = parts[number].rfind(b"\n")
        # Every other part is between quotation marks; a doubled one has an empty part.
        if number % 2 == 0 and line_feed >= 0:
            return start + line_feed
        stop = start - 1
    return -1


def _write_first_rows(file: Path, part: Path, most_bytes: int) -> None:
    """Writes the first rows of a Parquet file as another one."""
    source: Any = pq.ParquetFile(file)  # pyarrow has no type hints
    size = 0
    with pq.ParquetWriter(part, source.schema_arrow) as writer:
        for batch in source.iter_batches(batch_size=_ROWS):
            writer.write_batch(batch)
            size += batch.nbytes
            if size >= most_bytes:
                break
