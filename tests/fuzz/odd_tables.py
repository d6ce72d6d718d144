"""Tables that are valid but odd, and tables that grow when they are decoded."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

_ROWS = 50


def tables() -> Iterator[tuple[str, pa.Table]]:
    """Tables with a column `text`, named by what is odd about them."""
    texts = [f"a text {number}" for number in range(_ROWS)]
    columns = {
        "large strings": pa.array(texts, pa.large_string()),
        "string views": pa.array(texts, pa.string_view()),
        "binary": pa.array([text.encode() for text in texts], pa.binary()),
        "invalid UTF-8": pa.array([b"\xff\xfe text"] * _ROWS, pa.binary()).view(pa.string()),
        "half invalid UTF-8": pa.array([b"fine", b"\xc3("] * (_ROWS // 2), pa.binary()).view(pa.string()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "dictionary of numbers": pa.array([1, 2] * 25).dictionary_encode(),
        "nulls": pa.nulls(_ROWS, pa.string()),
        "null type": pa.nulls(_ROWS),
        "half nulls": pa.array([None, "a"] * 25),
        "numbers": pa.array(range(_ROWS)),
        "floats": pa.array([float("nan")] * _ROWS),
        "lists": pa.array([[text] for text in texts]),
        "structs": pa.array([{"text": text} for text in texts]),
        "maps": pa.array([[("a", text)] for text in texts], pa.map_(pa.string(), pa.string())),
        "timestamps": pa.array(range(_ROWS), pa.timestamp("ns")),
        "far timestamps": pa.array([2**62] * _ROWS, pa.timestamp("s")),
        "dates": pa.array([2**31 - 1] * _ROWS, pa.date32()),
        "decimals": pa.array([1] * _ROWS, pa.decimal128(38)),
        "booleans": pa.array([True] * _ROWS),
        "fixed binary": pa.array([b"abcd"] * _ROWS, pa.binary(4)),
        "empty texts": pa.array([""] * _ROWS),
        "zero bytes": pa.array(["a\0b"] * _ROWS),
    }
    for name, column in columns.items():
        yield name, pa.table({"text": column, "prompt": pa.array(texts)})
    yield "no rows", pa.table({"text": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    yield "no column", pa.table({"content": texts})
    yield "no columns", pa.table({})
    yield "two columns of a name", pa.Table.from_arrays([pa.array(texts)] * 3, names=["text", "text", "prompt"])
    yield "a dotted name", pa.table({"text.a": texts, "text": texts, "prompt": texts})
    yield "an odd name", pa.table({"text": texts, "prompt": texts, "": texts, "\x00": texts, "a" * 9999: texts})
    yield "many columns", pa.table({"text": texts, "prompt": texts, **{f"c{number}": texts for number in range(500)}})
    nested = pa.string()
    for _ in range(60):
        nested = pa.list_(nested)
    yield "deep nesting", pa.table({"text": texts, "prompt": texts, "deep": pa.nulls(_ROWS, nested)})
    yield from _bombs()


def _bombs() -> Iterator[tuple[str, pa.Table]]:
    for name, length, rows in (("a bomb of repeats", 4 * 2**20, 2000), ("a bomb of small repeats", 2**14, 300_000)):
        indices = pa.array([0], pa.int32()).take(pa.nulls(rows, pa.int32()).fill_null(0))
        column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * length]))
        yield name, pa.table({"text": column, "prompt": column})
    cell = pa.array(["a" * 2**28])
    yield "a cell of 256 MiB", pa.table({"text": cell, "prompt": pa.array(["a"])})
    short = pa.array(["a" * (9 * 2**20)] * 12)
    yield "cells of 9 MiB", pa.table({"text": short, "prompt": pa.array(["a"] * 12)})
