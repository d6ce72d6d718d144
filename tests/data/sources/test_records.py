"""Bad records are quarantined with file, offset and reason, too many stop the job; a file that is
no use is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.sources import records
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.input_files import input_files
from pipeline.data.tokenize.unit_records import QUARANTINE
from pipeline.errors import DataError
from tests.data.helpers import COMPRESS, documents, jsonl, read, texts_in, tokenize
from tests.files import read_jsonl

GOOD = documents(40)
BAD = {
    "malformed_json": b'{"text": "cut',
    "not_an_object": b'["text"]',
    "no_text_key": b'{"content": "here"}',
    "text_not_string": b'{"text": 17}',
    "invalid_utf8": b'{"text": "\xff\xfe"}',
    "empty_text": b'{"text": " \\n\\t "}',
    "nul_character": b'{"text": "a\\u0000b"}',
}


@pytest.mark.parametrize("unit_bytes", [500, 10**9])
def test_every_kind_is_quarantined(tmp_path: Path, unit_bytes: int):
    path, content, offsets = tmp_path / "x.jsonl", b"", {}
    for number, (reason, line) in enumerate(BAD.items()):
        content += jsonl(GOOD[number * 5 : number * 5 + 5])
        offsets[reason] = len(content)
        content += line + b"\n"
    path.write_bytes(content + b"\n   \n" + jsonl(GOOD[len(BAD) * 5 :]))
    made = tokenize(tmp_path / "out", path, unit_bytes=unit_bytes)
    assert texts_in(tmp_path / "out") == GOOD
    assert made.rejected == dict.fromkeys(sorted(BAD), 1)
    found = read_jsonl(tmp_path / "out" / QUARANTINE)
    assert {record["reason"]: record["offset"] for record in found} == offsets
    assert {record["file"] for record in found} == {str(path)}
    assert all(record["excerpt"] for record in found)


def test_too_many_bad_records_stop_the_job(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(GOOD) + b"nonsense\n" * 3 + b"{}\n")
    with pytest.raises(DataError) as error:
        tokenize(tmp_path / "out", path, max_bad_fraction=0.05)
    message = str(error.value)
    assert "4 of 44 records are bad, more than --max-bad-fraction 0.05 allows" in message
    assert message.count(f"{path} at ") == 3
    assert "malformed_json 'nonsense'" in message and "\n" not in message
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert tokenize(tmp_path / "out", path, max_bad_fraction=0.1).documents == 40, (
        "what was done is kept"
    )
    with pytest.raises(
        DataError, match="under the text_key 'content': its keys: id, text; set text_key to the one"
    ):
        list(good_documents([str(path)], Keys("content")))


@pytest.mark.parametrize("unit_bytes", [100_000, 10**9])
@pytest.mark.parametrize("damage", ["truncated_file", "corrupt_file"])
@pytest.mark.parametrize("kind", [kind for kind in COMPRESS if kind])
def test_documents_before_damage_are_kept(tmp_path: Path, kind: str, damage: str, unit_bytes: int):
    texts = documents(5_000, words=20)
    path = tmp_path / f"x.jsonl{kind}"
    whole = COMPRESS[kind](jsonl(texts))
    half = len(whole) // 2
    path.write_bytes(whole[:half] + (bytes(64) + whole[half + 64 :]) * (damage == "corrupt_file"))
    with pytest.raises(DataError, match=rf"{path}: is (truncated|damaged) after .*--allow-damaged"):
        tokenize(tmp_path / "refused", path, unit_bytes=unit_bytes)
    made = tokenize(tmp_path / "out", path, unit_bytes=unit_bytes, allow_damaged=True)
    kept = texts_in(tmp_path / "out")
    assert made.rejected[damage] == 1
    assert 1000 < len(kept) < len(texts)
    if damage == "truncated_file":  # damage in the middle may change a text before it is found
        assert kept == texts[: len(kept)]
        (record,) = read_jsonl(tmp_path / "out" / QUARANTINE)
        assert record["offset"] == len(jsonl(kept))
    assert kept[:1000] == texts[:1000]


def test_bad_rows_of_parquet(tmp_path: Path):
    raw = [b"fine", None, b"\xff\xfe", b"", b"a\0b", "좋다".encode()]
    column = pa.array(raw, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet", row_group_size=2)
    made = tokenize(tmp_path / "out", tmp_path / "x.parquet")
    assert texts_in(tmp_path / "out") == ["fine", "좋다"]
    assert made.rejected == {
        "empty_text": 1,
        "invalid_utf8": 1,
        "nul_character": 1,
        "text_not_string": 1,
    }
    found = read_jsonl(tmp_path / "out" / QUARANTINE)
    assert {record["offset"]: record["reason"] for record in found}[2] == "invalid_utf8"


def test_values_of_a_json_array_that_are_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert read(path) == []
    path.write_text(f'[{{"text": "a"}}, 1, {{"text": "{"b" * 2000}"}}, {{"text": "c"}}]')
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    assert [getattr(record, "reason", "") for record in read(path)] == [
        "",
        "not_an_object",
        "too_large",
        "",
    ]
    for content in ('[{"text": "a"}, {"text": ', '[{"text": "a"}] x', '["\\'):
        path.write_text(content)
        with pytest.raises(
            DataError,
            match=r"x\.json: not JSON \(.*line 1 column .*correct it, or write it as JSONL",
        ):
            read(path)


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        ({"text": [1]}, Keys(), "expected strings in the column 'text', found int64"),
        (
            {"content": ["a"], "url": ["b"]},
            Keys(),
            "no column 'text'; set --text-key to one of: content, url",
        ),
        (
            {"text": ["a"]},
            Keys("text", "question"),
            "no column 'question'; set --prompt-key to one of: text",
        ),
    ],
)
def test_columns_that_cannot_be_read(tmp_path: Path, columns: dict, keys: Keys, message: str):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x.parquet", keys=keys)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["missing.jsonl"], "no such file"),
        (["*.nothing"], "no such file"),
        (["table.xls"], "unknown format"),
        (["table.parquet.gz"], "unknown format"),
        (["empty.jsonl"], "is empty"),
        (["a.jsonl", "a*.jsonl"], "is named twice"),
        (["folder"], "is a folder; name its files by a pattern"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path: Path, inputs: list[str], message: str):
    for name in ("table.xls", "table.parquet.gz", "a.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message) as error:
        input_files([str(tmp_path / name) for name in inputs])
    assert str(tmp_path) in str(error.value)
