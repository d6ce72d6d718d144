"""Every format gives the same documents, however it is cut into units."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.sources import csv_tables, readers
from pipeline.data.sources import lines as line_reading
from pipeline.data.sources.csv_tables import csv_records
from pipeline.data.sources.lines import lines
from pipeline.data.sources.records import Keys, Rejected
from pipeline.data.sources.streams import open_stream, text_length
from pipeline.data.tokenize.units import split_file
from pipeline.errors import DataError
from tests.data.helpers import (
    COMPRESS,
    documents,
    jsonl,
    read,
    texts_in,
    texts_of,
    tokenize,
    write_jsonl,
)

TEXTS = documents(60)
DOCUMENTS = [f"{number}번째 문서입니다. 오늘은 날씨가 좋아서 산책을 갔다." for number in range(40)]
BOOK = "Chapter 1\r\nIt was late.\r\n\r\n \t\nChapter 2\n둘째 장.\n\n\n\nThe end"


@pytest.mark.parametrize("compression", COMPRESS)
def test_jsonl_in_any_compression_and_any_units(tmp_path: Path, compression: str):
    path = write_jsonl(tmp_path / f"x.jsonl{compression}", TEXTS)
    for unit_bytes in (1, 97, 1000, 10**9):
        assert texts_of(path, unit_bytes=unit_bytes) == TEXTS
    compress = COMPRESS[compression]  # consecutive members and frames are one text
    path.write_bytes(compress(jsonl(TEXTS[:20])) + compress(b"") + compress(jsonl(TEXTS[20:])))
    assert texts_of(path, unit_bytes=500) == TEXTS


@pytest.mark.parametrize(("unit_bytes", "units"), [(1, 9), (2500, 4), (10**9, 1)])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_parquet_by_row_groups(tmp_path: Path, unit_bytes: int, units: int, type_: pa.DataType):
    """FineWeb2's layout: `text` among other columns, some of them nested."""
    columns = {
        "id": list(range(60)),
        "nested": [{"a": [1], "b": {"text": "no"}}] * 60,
        "text": pa.array(TEXTS, type_),
        "language_score": [0.9] * 60,
    }
    path = tmp_path / "000_00000.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=7)
    assert len(split_file(path, 0, Keys(), unit_bytes)) == units
    assert texts_of(path, unit_bytes=unit_bytes) == TEXTS


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_files_written_on_windows(tmp_path: Path, name: str):
    """A byte-order mark, also where files were joined, and CRLF are no text; JSON's own escapes
    are."""
    content = (
        b"\xef\xbb\xbf\r\n"
        + jsonl(["one\r\n"]).replace(b"\n", b"\r\n")
        + b"\xef\xbb\xbf"
        + jsonl(["\ufefftwo"])
    )
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts_of(tmp_path / name) == ["one\r\n", "\ufefftwo"]
    (tmp_path / "x.txt").write_bytes("\ufeff하나\r\n\r\n둘\r\n\ufeffthree".encode())
    assert texts_of(tmp_path / "x.txt", unit_bytes=3) == ["하나", "둘", "three"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_of_records(tmp_path: Path, indent: int | None):
    array = [
        {"instruction": f'{number} ["{{\\', "output": '한 \n "\\\\" ]},' * number}
        for number in range(1, 30)
    ]
    content = json.dumps(array, indent=indent, ensure_ascii=indent is None)
    (tmp_path / "x.json").write_text("\ufeff" + content, encoding="utf-8")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("x.json", "x.json.gz"):
        found = read(tmp_path / name, keys=Keys("output", "instruction"))
        assert [(record.prompt, record.text) for record in found] == [
            tuple(record.values()) for record in array
        ]


# --- Lines and paragraphs -------------------------------------------------------------------------


class Bytes:
    """A stream over bytes in memory."""

    fault = None

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read_at(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


@given(
    st.lists(st.sampled_from([b"", b" \r", b"a", b"bb", b"c" * 30]), max_size=12),
    st.booleans(),
    st.data(),
)
def test_every_line_belongs_to_one_range(pieces: list[bytes], ended: bool, data: st.DataObject):
    """Each line belongs to the range it begins in, wherever the cuts and the reading blocks fall."""
    content = b"\n".join(pieces) + (b"\n" if ended and pieces else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCK_BYTES", "_BLOCK_BYTES_PAST_END"):
            patch.setattr(line_reading, name, data.draw(st.integers(1, 40)))
        edges = itertools.pairwise([0, *cuts, len(content)])
        found = []
        for start, stop in edges:
            found += lines(Bytes(content), start, stop)
    expected = []
    if content:
        expected = content.removesuffix(b"\n").split(b"\n")
    assert [line.content for line in found] == expected
    for line in found:
        assert content[line.offset : line.offset + line.size] == line.content


def test_going_back_further_than_the_window(tmp_path: Path):
    content = b"".join(b"%09d\n" % number for number in range(600_000))
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(content, preset=0))
    stream = open_stream(tmp_path / "x.txt.xz")
    for offset in (5_000_000, 5_999_990, 10, 3_000_000, 2_900_000, 0):
        assert stream.read_at(offset, 10) == content[offset : offset + 10]
    assert stream.read_at(6_000_000, 10) == b""
    assert text_length(tmp_path / "x.txt.xz") == (len(content), None)


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_book_by_lines_and_as_a_whole(tmp_path, suffix):
    path = tmp_path / f"book.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbf" + BOOK.encode()))
    assert texts_of(path) == ["Chapter 1", "It was late.", "Chapter 2", "둘째 장.", "The end"]
    assert texts_of(path, keys=AS_A_WHOLE) == [BOOK.replace("\r\n", "\n")]
    assert tokenize(tmp_path / "out", path, document="file").documents == 1
    assert load_manifest(tmp_path / "out").document == "file"
    with pytest.raises(
        DataError, match="begun with another document: expected 'line', found 'file'"
    ):
        tokenize(tmp_path / "out", path)


AS_A_WHOLE = Keys(document="file")


def test_a_document_that_is_too_large_is_left_out(tmp_path, monkeypatch):
    for module in (readers, line_reading):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "x.txt"
    path.write_text("short\n" + "long line " * 200 + "\nlast")
    assert texts_of(path) == ["short", "too_large", "last"]
    assert texts_of(path, keys=AS_A_WHOLE) == ["too_large"]


TOO_LARGE = {
    "unquoted": "START {long} END",
    "quoted": '"START {long} END"',
    "with quotes": '"START ""{long}"" {long}, END"',
    "first line": '"START {long}\nmore, text"',
    "middle line": '"START\n{long}\n7,END"',
    "last line": '"START\n{long} END"',
    "many lines": '"START\n{rows}8,END"',
    "many lines and quotes": '"START\n{quoted}8,END"',
}


@pytest.mark.parametrize("block_bytes", [64, 4 << 20])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_row_that_is_too_large_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
):
    """No part of it is read as a row, wherever its lines end."""
    for module in (csv_tables, line_reading):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    for constant in ("BLOCK_BYTES", "_BLOCK_BYTES_PAST_END"):
        monkeypatch.setattr(line_reading, constant, block_bytes)
    long, rows, quoted = "a, word " * 200, "7,the same line\n" * 200, '7,""a"" word\n' * 200
    row = "1," + TOO_LARGE[name].format(long=long, rows=rows, quoted=quoted)
    path = tmp_path / "x.csv"
    if name == "unquoted":
        row = row.replace("a, word", "a word")
    path.write_text(f'id,text\n0,zero\n{row}\n2,two\n3,"x\ny"\n')
    assert texts_of(path) == ["zero", "too_large", "two", "x\ny"]
    rejected = read(path, unit_bytes=10**9)[1]
    assert isinstance(rejected, Rejected)
    assert rejected.excerpt.startswith(row.splitlines()[0][:30].encode())
    assert rejected.size == len(row) - row.count("\n")


def test_a_line_of_just_the_largest_size_is_read_within_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (csv_tables, line_reading):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "x.csv"
    path.write_text(f'id,text\n1,"one\n{"x" * 1000}\n{"y" * 1000}\nEND"\n2,two\n')
    assert texts_of(path) == ["too_large", "two"]
    path.write_text(f"id,text{'x' * 1000}\n1,one\n")
    with pytest.raises(DataError, match=f"{path}: expected the names .* found a row of more than"):
        texts_of(path)


# --- Tables of text and other encodings -----------------------------------------------------------

ROWS = 'id,question,text\r\n1,"왜?","하나, ""둘""\r\n셋"\r\n\r\n2,누가?,넷\r\n'


@pytest.mark.parametrize(("name", "compression"), [("x.csv", ""), ("x.tsv", ".zst")])
def test_csv_and_tsv(tmp_path: Path, name: str, compression: str):
    path = tmp_path / f"{name}{compression}"
    content = ROWS if name == "x.csv" else ROWS.replace(",", "\t").replace("하나\t", "하나,")
    path.write_bytes(COMPRESS[compression](b"\xef\xbb\xbf" + content.encode()))
    assert texts_of(path, keys=Keys(quoting="standard")) == ['하나, "둘"\r\n셋', "넷"]
    asked = Keys("text", "question", quoting="standard")
    assert [record.prompt for record in read(path, keys=asked, unit_bytes=3)] == ["왜?", "누가?"]
    with pytest.raises(
        DataError, match=f"{path}: has no column 'content'; set --text-key to one of: id, q"
    ):
        read(path, keys=Keys("content"))


# Neither numbers nor titles, so that none is a row of the table.
CSV_LINES = [
    "a, b",
    "one, two, three",
    '"No", she said',
    "한 줄, 두 줄",
    "",
    ",",
    '"',
    "x\r",
    "word",
]
CSV_TEXTS = st.one_of(
    st.lists(st.sampled_from(CSV_LINES), max_size=30).map("\n".join),
    st.sampled_from(CSV_LINES).map(lambda line: "\n".join([line] * 15)),
)
CSV_TITLES = st.text('TQ,"\r\n ', max_size=9)


CSV_COLUMNS = [
    ["text"],
    ["id", "text"],
    ["text", "id"],
    ["title", "text"],
    ["text", "title"],
    ["id", "text", "title"],
]


@given(st.lists(st.tuples(CSV_TITLES, CSV_TEXTS), max_size=20), st.sampled_from(CSV_COLUMNS))
def test_any_table_that_csv_writes_is_read_whole(rows: list[tuple[str, str]], names: list[str]):
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names, extrasaction="ignore")
    writer.writeheader()
    for number, (title, text) in enumerate(rows):
        writer.writerow({"id": number, "title": title, "text": text})
    found = csv_records(Bytes(file.getvalue().encode()), Keys(), "csv")
    # White space is no text.
    assert [getattr(record, "text", "") for record in found] == [
        text if text.strip() else "" for _, text in rows
    ]


def test_bad_rows_of_a_csv_are_rejected(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'text,id\ngood,1\n"a"b,2\nshort\n\xff,3\n ,4\nlast,5\n"open,6\n')
    made = tokenize(tmp_path / "out", path)
    assert texts_in(tmp_path / "out") == ["good", "last"]
    assert made.rejected == {"malformed_csv": 3, "invalid_utf8": 1, "empty_text": 1}
    whole = COMPRESS[".gz"](b"text\n" + b"".join(b"%d\n" % number for number in range(50_000)))
    (tmp_path / "x.csv.gz").write_bytes(whole[: len(whole) // 2])
    shutil.copy(tmp_path / "x.csv.gz", tmp_path / "x.txt.gz")
    with pytest.raises(
        DataError, match=r"x\.csv\.gz: is truncated after .* set `allow_damaged: true`"
    ):
        texts_of(tmp_path / "x.csv.gz")
    assert texts_of(tmp_path / "x.txt.gz", keys=AS_A_WHOLE._replace(allow_damaged=True)) == [
        "truncated_file"
    ]
    *kept, last = texts_of(tmp_path / "x.csv.gz", keys=Keys(allow_damaged=True))
    assert last == "truncated_file" and len(kept) > 1000
    assert kept == [str(number) for number in range(len(kept))]


@pytest.mark.parametrize(
    ("name", "encoding"), [("x.jsonl", "cp949"), ("x.txt.gz", "euc-kr"), ("x.csv", "utf-16")]
)
def test_another_encoding_is_named_and_read(tmp_path: Path, name: str, encoding: str):
    lines = {"x.jsonl": jsonl(DOCUMENTS).decode(), "x.txt.gz": "\n".join(DOCUMENTS)}
    content = lines.get(name, "\n".join(["text", *DOCUMENTS])).encode(encoding)
    path = tmp_path / name
    path.write_bytes(COMPRESS[".gz" if name.endswith("gz") else ""](content))
    advised = "cp949" if encoding in ("cp949", "euc-kr") else encoding
    with pytest.raises(
        DataError, match=f"{path} is likely {advised}, not UTF-8: set `encoding: {advised}` for"
    ):
        tokenize(tmp_path / "other", path, max_bad_fraction=0.01)
    tokenize(tmp_path / "out", path, encoding=encoding, unit_bytes=500)
    assert texts_in(tmp_path / "out") == DOCUMENTS
    assert load_manifest(tmp_path / "out").encoding == encoding


def test_bytes_that_an_encoding_does_not_have_cost_their_record(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(
        "하나\n".encode("cp949") + b"\xff\xff\n" + "둘\n".encode("cp949")
    )
    assert texts_of(tmp_path / "x.txt", keys=Keys(encoding="cp949")) == [
        "하나",
        "invalid_utf8",
        "둘",
    ]
    with pytest.raises(DataError, match="unknown encoding 'cp94'"):
        read(tmp_path / "x.txt", keys=Keys(encoding="cp94"))
    (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS) + b'{"text": "\xff"}\n' * 9)
    with pytest.raises(DataError, match="raise --max-bad-fraction"):  # too few for an encoding
        tokenize(tmp_path / "out", tmp_path / "x.jsonl", max_bad_fraction=0.01)


EMPTY_COLUMNS = {
    "no rows": pa.array([], pa.string()),
    "no rows of another type": pa.array([], pa.float64()),
    "nulls": pa.array([None] * 9, pa.string()),
    "nulls of another type": pa.array([None] * 9, pa.float64()),
    "nulls of no type": pa.nulls(9),
}


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
@pytest.mark.parametrize("column", EMPTY_COLUMNS)
def test_a_shard_without_texts_has_no_rows(
    tmp_path: Path, column: str, end: str, caplog: pytest.LogCaptureFixture
):
    """Beside others that have some; pandas gives such a column any type."""

    def write(path: Path, texts: pa.Array) -> Path:
        table = pa.table({"text": texts})
        if end == ".parquet":
            pq.write_table(table, path, row_group_size=4)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as to:
                to.write_table(table, max_chunksize=4)
        return path

    empty = write(tmp_path / f"empty{end}", EMPTY_COLUMNS[column])
    full = write(tmp_path / f"full{end}", pa.array(["one", None, "two"]))
    assert texts_of(empty, full) == ["one", "text_not_string", "two"]
    assert f"{empty}: has no text under text: it gives no document" in caplog.text
    wrong = write(tmp_path / f"wrong{end}", pa.array([1.0, None]))
    with pytest.raises(DataError, match="expected strings in the column 'text', found double"):
        texts_of(wrong)


def test_a_corpus_of_nothing_but_empty_shards_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"text": pa.nulls(3)}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no usable document in 0 records"):
        tokenize(tmp_path / "out", tmp_path / "x.parquet")
