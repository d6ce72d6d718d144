"""Bad records are quarantined with file, offset and reason; too many of them stop the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.jobs import QUARANTINE
from pipeline.errors import DataError
from tests.data.helpers import COMPRESS, documents, jsonl, texts_in, tokenize

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


def quarantined(folder: Path) -> list[dict]:
    path = folder / QUARANTINE
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def with_bad_lines() -> tuple[bytes, dict[str, int]]:
    """Good documents with one bad line of each kind among them, and the offsets of those lines."""
    parts, offsets = [], {}
    for number, (reason, line) in enumerate(BAD.items()):
        parts.append(jsonl(GOOD[number * 5 : number * 5 + 5]))
        offsets[reason] = sum(map(len, parts))
        parts.append(line + b"\n")
    parts.append(b"\n   \n" + jsonl(GOOD[len(BAD) * 5 :]))
    return b"".join(parts), offsets


@pytest.mark.parametrize("unit_bytes", [500, 10**9])
def test_every_kind_is_quarantined(tmp_path: Path, unit_bytes: int):
    content, offsets = with_bad_lines()
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    made = tokenize(tmp_path / "out", path, unit_bytes=unit_bytes)
    assert texts_in(tmp_path / "out") == GOOD
    assert made.rejected == dict.fromkeys(sorted(BAD), 1)
    records = quarantined(tmp_path / "out")
    assert {record["reason"]: record["offset"] for record in records} == offsets
    assert {record["file"] for record in records} == {str(path)}
    assert all(record["excerpt"] for record in records)


def test_bad_rows_of_parquet(tmp_path: Path):
    raw = [b"fine", None, b"\xff\xfe", b"", b"a\0b", "좋다".encode()]
    column = pa.array(raw, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet", row_group_size=2)
    made = tokenize(tmp_path / "out", tmp_path / "x.parquet")
    assert texts_in(tmp_path / "out") == ["fine", "좋다"]
    assert made.rejected == {"empty_text": 1, "invalid_utf8": 1, "nul_character": 1, "text_not_string": 1}
    assert {record["offset"]: record["reason"] for record in quarantined(tmp_path / "out")}[2] == "invalid_utf8"


def test_a_column_that_is_not_text(tmp_path: Path):
    pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="expected strings in the column 'text', found int64"):
        tokenize(tmp_path / "out", tmp_path / "x.parquet")


@pytest.mark.parametrize("unit_bytes", [100_000, 10**9])
@pytest.mark.parametrize("damage", ["truncated_file", "corrupt_file"])
@pytest.mark.parametrize("kind", [kind for kind in COMPRESS if kind])
def test_documents_before_damage_are_kept(tmp_path: Path, kind: str, damage: str, unit_bytes: int):
    texts = documents(5_000, words=20)
    path = tmp_path / f"x.jsonl{kind}"
    whole = COMPRESS[kind](jsonl(texts))
    half = len(whole) // 2
    path.write_bytes(whole[:half] + (bytes(64) + whole[half + 64 :]) * (damage == "corrupt_file"))
    made = tokenize(tmp_path / "out", path, unit_bytes=unit_bytes)
    kept = texts_in(tmp_path / "out")
    assert made.rejected[damage] == 1
    assert 1000 < len(kept) < len(texts)
    if damage == "truncated_file":  # damage in the middle may change a text before it is found
        assert kept == texts[: len(kept)]
        (record,) = quarantined(tmp_path / "out")
        assert record["offset"] == len(jsonl(kept))
    assert kept[:1000] == texts[:1000]


def test_a_document_of_200_mb_takes_little_memory(tmp_path: Path):
    """The good documents of the same file are kept."""
    huge = b'{"text": "' + b"a" * 200_000_000 + b'"}\n'
    content = jsonl(GOOD[:5]) + huge + jsonl(GOOD[5:])
    (tmp_path / "plain.jsonl").write_bytes(content)
    code = (
        "import re, sys; from tests.data.helpers import tokenize; from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "made = tokenize(folder / 'out', folder / 'plain.jsonl')\n"
        "print(made.documents, dict(made.rejected))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    made, peak_kib = done.stdout.splitlines()
    assert made == "40 {'too_large': 1}"
    assert int(peak_kib) < 500 * 1024
    (record,) = quarantined(tmp_path / "out")
    assert (record["offset"], len(record["excerpt"])) == (len(jsonl(GOOD[:5])), 200)


def test_too_many_bad_records_stop_the_job(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(GOOD) + b"nonsense\n" * 3 + b"{}\n")
    with pytest.raises(DataError) as error:
        tokenize(tmp_path / "out", path, max_bad_fraction=0.05)
    message = str(error.value)
    assert "4 of 44 records are bad, more than --max-bad-fraction 0.05 allows" in message
    assert message.count(f"{path} at ") == 3
    assert "malformed_json 'nonsense'" in message
    assert "\n" not in message
    assert not (tmp_path / "out" / "manifest.json").exists()
    made = tokenize(tmp_path / "out", path, max_bad_fraction=0.1)  # what was done is kept
    assert made.documents == 40
