"""The text of files, by the compression and encoding that their names and contents say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.sources.streams import likely_encoding, text_length, text_per_byte
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
