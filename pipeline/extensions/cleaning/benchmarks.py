"""The questions of benchmarks, in the formats in which they are published."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import Document

from pipeline.data.sources.json_records import begins_array
from pipeline.data.sources.lines import BYTE_ORDER_MARK, beginning, line_end, lines
from pipeline.data.sources.object_stores import InputPath
from pipeline.data.sources.records import MAX_RECORD_BYTES
from pipeline.data.sources.streams import Stream, open_stream
from pipeline.data.tokenize.input_files import kind_of
from pipeline.errors import DataError, faults_of_library

# A row is at most as long as a record of a corpus.
_DELIMITERS = {"csv": ",", "tsv": "\t"}


def benchmark_documents(files: Sequence[InputPath], *_: object) -> Iterator[Document]:
    """What each record of the files says, whatever its keys or columns are called.

    `whole`, in the metadata: the questions of a record, and all that it says.

    Raises:
        DataError: a file cannot be read as its name says.
    """
    for file in files:
        for value in _records_of(file):
            strings = list(_strings_in(value))
            # Questions, and the whole record: these may have fewer words than are looked for.
            whole = [string for string in strings if string.rstrip().endswith("?")]
            whole.append(" ".join(strings))
            yield Document(" ".join(strings), str(file), metadata={"whole": whole})


def _records_of(file: InputPath) -> Iterator[object]:
    """The records of a file as values of JSON; of a table without a header the first row is one."""
    kind = kind_of(file)
    with faults_of_library(f"{file}: cannot read this benchmark", DataError):
        if kind == "parquet":
            yield from _parquet_rows(file)
        elif kind == "arrow":
            yield from _arrow_rows(file)
        elif kind in _DELIMITERS:
            yield from _cells(open_stream(file), kind)
        else:
            yield from _json_values(open_stream(file))


def _parquet_rows(file: InputPath) -> Iterator[object]:
    with file.open("rb") as opened:
        for batch in pq.ParquetFile(opened).iter_batches():
            yield from batch.to_pylist()


def _arrow_rows(file: InputPath) -> Iterator[object]:
    with file.open("rb") as opened:
        source: Any = pa.PythonFile(opened, mode="r")
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        for batch in reader.read_all().to_batches():
            yield from batch.to_pylist()


def _cells(stream: Stream, kind: str) -> Iterator[list[str]]:
    """The rows of a table; quotation marks in a TSV are ordinary characters."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows = (
        line.content.removeprefix(BYTE_ORDER_MARK).decode() + "\n"
        for line in lines(stream, 0, sys.maxsize, line_end(stream))
    )
    if kind == "tsv":
        yield from csv.reader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        yield from csv.reader(rows, delimiter=_DELIMITERS[kind], strict=True)


def _json_values(stream: Stream) -> Iterator[object]:
    """The values of JSON, one a line or all in an array."""
    if begins_array(stream):
        yield from orjson.loads(beginning(stream, sys.maxsize).removeprefix(BYTE_ORDER_MARK))
        return
    for line in lines(stream, 0, sys.maxsize, line_end(stream)):
        content = line.content.removeprefix(BYTE_ORDER_MARK).strip()
        if not content:
            continue
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            shown = content[:60].decode(errors="backslashreplace")
            raise DataError(
                f"{stream.path}: a benchmark is JSONL, CSV, TSV or Parquet, found {shown!r}"
            ) from None
        yield value


def _strings_in(value: object) -> Iterator[str]:
    """The strings in a value of JSON, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings_in(one)
