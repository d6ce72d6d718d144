"""Text files whose documents are files, or separated by blank lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import readers
from pipeline.data.records import Document, Keys
from pipeline.data.token_corpus import load_manifest
from pipeline.data.units import split_file, unit_records
from pipeline.errors import DataError
from tests.data.helpers import COMPRESS, tokenize

BOOK = "Chapter 1\r\nIt was late.\r\n\r\n \t\nChapter 2\n둘째 장.\n\n\n\nThe end"


def read(path: Path, document: str, unit_bytes: int = 10**9) -> list[str]:
    keys = Keys(document=document)
    records = [record for unit in split_file(path, 0, keys, unit_bytes) for record in unit_records(unit, keys)]
    return [record.text if isinstance(record, Document) else record.reason for record in records]


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_book_by_lines_by_paragraphs_and_as_a_whole(tmp_path, suffix):
    path = tmp_path / f"book.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbf" + BOOK.encode()))
    assert read(path, "line") == ["Chapter 1", "It was late.", "Chapter 2", "둘째 장.", "The end"]
    assert read(path, "blank_line") == ["Chapter 1\nIt was late.", "Chapter 2\n둘째 장.", "The end"]
    assert read(path, "file") == [BOOK.replace("\r\n", "\n")]


@given(
    st.lists(st.sampled_from(["a", "bb", "", " ", "\t \r", "c c", "딱"]), max_size=12),
    st.integers(1, 9),
    st.booleans(),
)
def test_paragraphs_do_not_depend_on_where_a_file_is_cut(tmp_path_factory, lines, unit_bytes, ends):
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes("\n".join(lines).encode() + b"\n" * ends)
    expected, current = [], []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line.rstrip("\r"))
        elif current:
            expected.append("\n".join(current))
            current = []
    assert read(path, "blank_line", unit_bytes) == expected


def test_a_long_stretch_of_white_space_is_one_blank_line(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_LOOK_BACK_BYTES", 60)
    path = tmp_path / "x.txt"
    path.write_text("one\n" + " " * 50 + "\ntwo\nmore\n\nthree")
    for unit_bytes in range(1, 70):
        assert read(path, "blank_line", unit_bytes) == ["one", "two\nmore", "three"]


def test_a_document_that_is_too_large_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "x.txt"
    path.write_text("short\n\n" + "long line\n" * 200 + "\nlast")
    assert read(path, "blank_line") == ["short", "too_large", "last"]
    assert read(path, "file") == ["too_large"]
    with pytest.raises(DataError, match=r"too_large .*a document has at most 32 MiB: split them \(a .txt by"):
        tokenize(tmp_path / "out", path, document="file", max_bad_fraction=0.01)


def test_a_truncated_file_loses_its_last_document_only(tmp_path):
    path = tmp_path / "x.txt.gz"
    whole = COMPRESS[".gz"]("".join(f"document {number}\n\n" for number in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    *found, last = read(path, "blank_line", 1000)
    assert found == [f"document {number}" for number in range(len(found))]
    assert len(found) > 100
    assert last == "truncated_file"
    assert read(path, "file") == ["truncated_file"]


def test_a_corpus_records_it_and_is_not_continued_otherwise(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text(BOOK)
    assert tokenize(tmp_path / "out", path, document="blank_line").documents == 3
    assert load_manifest(tmp_path / "out").document == "blank_line"
    with pytest.raises(DataError, match="begun with another document: expected 'line', found 'blank_line'"):
        tokenize(tmp_path / "out", path)
