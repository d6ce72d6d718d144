"""Every format gives the same documents, however it is cut into units."""

from __future__ import annotations

import itertools
import lzma
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import readers
from pipeline.data.readers import lines
from pipeline.data.records import Document, Keys
from pipeline.data.text_streams import open_stream, text_length
from pipeline.data.token_corpus import load_manifest
from pipeline.data.units import input_files, split_file, unit_records
from pipeline.errors import DataError
from tests.data.helpers import COMPRESS, STORIES260K, documents, jsonl, run_main, texts_in, tokenize, write_jsonl

TEXTS = documents(60)
DOCUMENTS = [f"{number}번째 문서입니다. 오늘은 날씨가 좋아서 산책을 갔다." for number in range(40)]


def units_text(path: Path, unit_bytes: int, text_key: str = "text") -> list[str]:
    keys = Keys(text_key)
    records = [record for unit in split_file(path, 0, keys, unit_bytes) for record in unit_records(unit, keys)]
    assert all(isinstance(record, Document) for record in records)
    return [record.text for record in records]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("unit_bytes", [1, 97, 1000, 10**9])
def test_jsonl_in_any_compression_and_any_units(tmp_path: Path, compression: str, unit_bytes: int):
    path = write_jsonl(tmp_path / f"x.jsonl{compression}", TEXTS)
    assert units_text(path, unit_bytes) == TEXTS


def test_consecutive_members_and_frames_are_one_text(tmp_path: Path):
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"y.jsonl{suffix}"
        path.write_bytes(compress(jsonl(TEXTS[:20])) + compress(b"") + compress(jsonl(TEXTS[20:])))
        assert units_text(path, 500) == TEXTS


def test_plain_text_has_a_document_a_line(tmp_path: Path):
    (tmp_path / "x.txt").write_text("하나\n\n  \ntwo words\r\nlast", encoding="utf-8")
    assert units_text(tmp_path / "x.txt", 3) == ["하나", "two words", "last"]


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
    assert units_text(path, unit_bytes) == TEXTS


@pytest.mark.parametrize("unit_bytes", [1, 10**9])
def test_folders_saved_by_datasets(tmp_path: Path, unit_bytes: int):
    whole = datasets.Dataset.from_dict({"n": list(range(60)), "content": TEXTS})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"a": whole.select(range(20)), "b": whole.select(range(20, 60))}).save_to_disk(
        tmp_path / "two"
    )
    for folder in (tmp_path / "one", tmp_path / "two"):
        files = input_files([str(folder)])
        assert [text for file in files for text in units_text(file, unit_bytes, "content")] == TEXTS


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["missing.jsonl"], "no such file"),
        (["*.nothing"], "no such file"),
        (["table.xls"], "unknown format"),
        (["table.parquet.gz"], "unknown format"),
        (["empty.jsonl"], "is empty"),
        (["a.jsonl", "*.jsonl"], "is named twice"),
        (["folder"], "was not saved by `datasets`"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path: Path, inputs: list[str], message: str):
    for name in ("table.xls", "table.parquet.gz", "a.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder").mkdir()
    if inputs == ["empty.jsonl"]:
        (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=message) as error:
        input_files([str(tmp_path / name) for name in inputs])
    assert str(tmp_path) in str(error.value)


def test_the_error_about_a_missing_column_lists_the_columns(tmp_path: Path):
    pq.write_table(pa.table({"content": ["a"], "url": ["b"]}), tmp_path / "x.parquet")
    datasets.Dataset.from_dict({"content": ["a"]}).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "x.parquet", *input_files([str(tmp_path / "saved")])):
        with pytest.raises(DataError, match=r"no column 'text'; set --text-key to one of: content"):
            split_file(path, 0, Keys(), 100)


class Bytes:
    """A stream over bytes in memory."""

    fault = None

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read_at(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


@given(st.lists(st.sampled_from([b"", b" \r", b"a", b"bb", b"c" * 30]), max_size=12), st.booleans(), st.data())
def test_every_line_belongs_to_one_range(pieces: list[bytes], ended: bool, data: st.DataObject):
    """Each line belongs to the range it begins in, wherever the cuts and the reading blocks fall."""
    content = b"\n".join(pieces) + (b"\n" if ended and pieces else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    edges = [0, *cuts, len(content)]
    blocks = readers._BLOCK_BYTES, readers._BLOCK_BYTES_PAST_END
    readers._BLOCK_BYTES = readers._BLOCK_BYTES_PAST_END = data.draw(st.integers(1, 40))
    try:
        found = [line for start, stop in itertools.pairwise(edges) for line in lines(Bytes(content), start, stop)]
    finally:
        readers._BLOCK_BYTES, readers._BLOCK_BYTES_PAST_END = blocks
    assert [line.content for line in found] == content.split(b"\n")[
        : content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    ]
    assert [content[line.offset : line.offset + line.size] for line in found] == [line.content for line in found]


def test_going_back_further_than_the_window(tmp_path: Path):
    content = b"".join(b"%09d\n" % number for number in range(600_000))
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(content, preset=0))
    stream = open_stream(tmp_path / "x.txt.xz")
    for offset in (5_000_000, 5_999_990, 10, 3_000_000, 2_900_000, 0):
        assert stream.read_at(offset, 10) == content[offset : offset + 10]
    assert stream.read_at(6_000_000, 10) == b""
    assert text_length(tmp_path / "x.txt.xz") == len(content)


# --- Tables of text and other encodings, through the tool ------------------------------------------------------------

ROWS = 'id,question,text\r\n1,"왜?","하나, ""둘""\r\n셋"\r\n\r\n2,누가?,넷\r\n'


def tokenize_tool(folder: Path, *arguments: str | Path) -> str:
    """The error line of tools/preprocess_data.py; empty where it made the corpus `out`."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    where = ["--tokenizer", STORIES260K, "--output", folder / "out", "--workers", "1"]
    done = run_main("preprocess_data.py", "--input", *arguments, *where)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    return next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "")


@pytest.mark.parametrize(("name", "compression"), [("x.csv", ""), ("x.tsv", ".zst")])
def test_csv_and_tsv(tmp_path: Path, name: str, compression: str):
    path = tmp_path / f"{name}{compression}"
    content = ROWS if name == "x.csv" else ROWS.replace(",", "\t").replace("하나\t", "하나,")
    path.write_bytes(COMPRESS[compression](b"\xef\xbb\xbf" + content.encode()))
    assert tokenize_tool(tmp_path, path) == ""
    assert texts_in(tmp_path / "out") == ['하나, "둘"\r\n셋', "넷"]
    keys = Keys("text", "question")
    (unit,) = split_file(path, 0, keys, 3)
    assert [record.prompt for record in unit_records(unit, keys)] == ["왜?", "누가?"]
    line = tokenize_tool(tmp_path, path, "--text-key", "content")
    assert line == f"error: {path}: has no column 'content'; set --text-key to one of: id, question, text"


def test_bad_rows_of_a_csv_are_rejected(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'text,id\ngood,1\n"a"b,2\nshort\n\xff,3\n ,4\nlast,5\n"open,6\n')
    made = tokenize(tmp_path / "out", path)
    assert texts_in(tmp_path / "out") == ["good", "last"]
    assert made.rejected == {"malformed_csv": 3, "invalid_utf8": 1, "empty_text": 1}
    whole = COMPRESS[".gz"](b"text\n" + b"".join(b"%d\n" % number for number in range(50_000)))
    (tmp_path / "x.csv.gz").write_bytes(whole[: len(whole) // 2])
    made = tokenize(tmp_path / "cut", tmp_path / "x.csv.gz")
    kept = texts_in(tmp_path / "cut")
    assert made.rejected == {"truncated_file": 1} and len(kept) > 1000
    assert kept == [str(number) for number in range(len(kept))]


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("x.jsonl", "cp949"), ("x.txt.gz", "euc-kr"), ("x.csv", "utf-16"), ("x.jsonl", "utf-16-le")],
)
def test_another_encoding_is_named_and_read(tmp_path: Path, name: str, encoding: str):
    texts = [text for text in DOCUMENTS if text.encode(encoding, errors="ignore").decode(encoding) == text]
    lines = {"x.jsonl": jsonl(texts).decode(), "x.txt.gz": "\n".join(texts), "x.csv": "\n".join(["text", *texts])}
    path = tmp_path / name
    path.write_bytes(COMPRESS[".gz" if name.endswith("gz") else ""](lines[name].encode(encoding)))
    advised = "cp949" if encoding in ("cp949", "euc-kr") else encoding
    line = tokenize_tool(tmp_path, path)
    assert f"{path} is likely {advised}, not UTF-8: set `encoding: {advised}` for the corpus (--encoding)" in line
    assert "max-bad-fraction and" not in line
    assert tokenize_tool(tmp_path, path, "--encoding", encoding, "--unit-mib", "0.0005") == ""
    assert texts_in(tmp_path / "out") == texts
    assert load_manifest(tmp_path / "out").encoding == encoding


def test_bytes_that_an_encoding_does_not_have_cost_their_record(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes("하나\n".encode("cp949") + b"\xff\xff\n" + "둘\n".encode("cp949"))
    made = tokenize(tmp_path / "out", tmp_path / "x.txt", encoding="cp949")
    assert texts_in(tmp_path / "out") == ["하나", "둘"]
    assert made.rejected == {"invalid_utf8": 1}
    assert "unknown encoding 'cp94'" in tokenize_tool(tmp_path, tmp_path / "x.txt", "--encoding", "cp94")


def test_few_bad_bytes_are_not_taken_for_another_encoding(tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS) + b'{"text": "\xff"}\n' * 9)
    assert "raise --max-bad-fraction" in tokenize_tool(tmp_path, tmp_path / "x.jsonl")
