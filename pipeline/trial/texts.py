"""Beginnings of a corpus's files, in their own formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.config.data import Corpus
from pipeline.data.sources.object_stores import RemoteFile
from pipeline.data.sources.streams import COMPRESSIONS, open_stream
from pipeline.data.tokenize.input_files import input_files, is_here, is_text, kind_of

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
        is_cut_by_lines = kind in _LINES and corpus.encoding is None and corpus.document == "line"
        if is_cut_by_lines:
            part = folder / f"{number}.{_plain_name(file)}"
            part.write_bytes(_first_lines(file, share))
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


def _first_lines(file: Path, most_bytes: int) -> bytes:
    """The first whole lines of a text, decompressed; one line at least."""
    stream = open_stream(file)
    content = b""
    while len(content) < most_bytes or b"\n" not in content:
        piece = stream.read_at(len(content), most_bytes)
        if not piece:
            return content
        content += piece
    return content[: content.rindex(b"\n") + 1]


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
