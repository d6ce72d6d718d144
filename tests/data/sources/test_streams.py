"""The text of files, by the compression and encoding that their names and contents say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.sources.streams import (
    likely_encoding,
    open_stream,
    text_length,
    text_per_byte,
)
from pipeline.errors import DataError
from tests.data.helpers import COMPRESS

TEXT = b'{"text": "the same line, many times"}\n' * 1000


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_capitals_in_a_name_say_the_same_compression(tmp_path: Path, suffix: str):
    lower = tmp_path / f"lower.jsonl{suffix}"
    upper = tmp_path / f"UPPER.JSONL{suffix.upper()}"
    for path in (lower, upper):
        path.write_bytes(COMPRESS[suffix](TEXT))
    assert text_per_byte(upper) == text_per_byte(lower) == len(TEXT) / lower.stat().st_size
    assert text_length(upper) == text_length(lower) == (len(TEXT), None)


@pytest.mark.parametrize("name", ["x.parquet", "X.PARQUET", "X.Arrow"])
def test_tables_have_no_encoding_to_guess(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes("한국어 문장입니다.\n".encode("cp949") * 50)
    assert likely_encoding(path) is None


@pytest.mark.parametrize(
    "encoding", ["base64", "hex", "zip", "rot13", "punycode", "idna", "undefined"]
)
def test_a_codec_of_other_things_than_text_is_refused(tmp_path: Path, encoding: str):
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT)
    with pytest.raises(
        DataError, match=f"{path}: expected an encoding of text files, found '{encoding}'; name"
    ):
        open_stream(path, encoding)


@pytest.mark.parametrize("encoding", ["cp94", "a\0b", "\ud800", ""])
def test_an_unknown_encoding_is_named(tmp_path: Path, encoding: str):
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT)
    with pytest.raises(DataError) as raised:
        open_stream(path, encoding)
    assert str(raised.value).startswith(f"{path}: unknown encoding {encoding!r}; name one of")


@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_without_the_byte_order_mark_of_its_encoding_is_named(
    tmp_path: Path, encoding: str, order: str
):
    path = tmp_path / "x.txt"
    text = "한국어 문장입니다.\n" * 50
    path.write_text(text, encoding=encoding)
    assert text_length(path, encoding) == (len(text.encode()), None)
    path.write_text(text, encoding=f"{encoding}-{order}")
    with pytest.raises(
        DataError,
        match=f"{path}: cannot be read as {encoding} .*; it is likely {encoding}-{order}: set `enc",
    ):
        text_length(path, encoding)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError, match=f"{path}: cannot be read as {encoding} .* if the file is UTF-8"
    ):
        text_length(path, encoding)
