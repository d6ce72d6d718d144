"""Damaged input files: a typed error of one line, or rejected records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from pipeline.data import readers, records
from pipeline.data.bad_records import Quarantine
from pipeline.data.records import Document, Keys, Record, Rejected
from pipeline.data.units import good_documents, input_files, split_file, unit_records
from pipeline.errors import DataError
from tests.data.helpers import documents, jsonl, tokenize, write_jsonl

TEXTS = documents(60)


def read(*inputs: Path, keys: Keys = Keys()) -> list[Record]:  # noqa: B008
    units = (unit for file in input_files([str(path) for path in inputs]) for unit in split_file(file, 0, keys, 1000))
    return [record for unit in units for record in unit_records(unit, keys)]


def reasons(records: list[Record]) -> list[str]:
    return [record.reason for record in records if isinstance(record, Rejected)]


def saved(folder: Path, texts: list[str] = TEXTS) -> Path:
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "expected files of this folder, found .*x.arrow; save"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow: no such file"),
        (
            '{"_data_files": [{"name": "x.arrow"}]}',
            "not a folder as `datasets` saves it; save it again: KeyError",
        ),
        ("[]", "state.json: expected a JSON object"),
        ("nonsense", "not JSON"),
    ],
)
def test_a_damaged_list_of_a_saved_dataset(tmp_path: Path, content: str, message: str):
    (saved(tmp_path / "saved") / "state.json").write_text(content)
    with pytest.raises(DataError, match=message):
        input_files([str(tmp_path / "saved")])


def test_bytes_of_an_arrow_file_that_are_not_utf8(tmp_path: Path):
    (path,) = input_files([str(saved(tmp_path / "saved", ["good", "first", "last"]))])
    path.write_bytes(path.read_bytes().replace(b"goodfirstlast", b"goodf\xffrstlast"))
    first, second, third = read(path)
    assert isinstance(first, Document)
    assert isinstance(third, Document)
    assert second == Rejected(1, "invalid_utf8", b"f\xffrst")


def test_offsets_of_an_arrow_file_that_are_damaged(tmp_path: Path):
    (path,) = input_files([str(saved(tmp_path / "saved", ["good", "first", "last"]))])
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 4, 9, 13))
    content = path.read_bytes()
    assert offsets in content
    path.write_bytes(content.replace(offsets, offsets.replace(b"\x09", b"\x63")))
    with pytest.raises(DataError, match=r"not a complete \.arrow file, copy it again"):
        read(path)


def test_a_quarantine_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Quarantine, "most_written", 100)
    (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS) + b"x\n" * 500)
    made = tokenize(tmp_path / "out", tmp_path / "x.jsonl")
    assert made.rejected == {"malformed_json": 500}
    assert len((tmp_path / "out" / "quarantine.jsonl").read_bytes().splitlines()) == 100


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_files_written_on_windows(tmp_path: Path, name: str):
    """A byte-order mark, also where files were joined, and CRLF are no text; JSON's own escapes are."""
    content = b"\xef\xbb\xbf\r\n" + jsonl(["one\r\n"]).replace(b"\n", b"\r\n") + b"\xef\xbb\xbf" + jsonl(["\ufefftwo"])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert [record.text for record in read(tmp_path / name)] == ["one\r\n", "\ufefftwo"]
    text = "\ufeff하나\r\n\r\n둘\r\n\ufeffthree".encode()
    (tmp_path / "x.txt").write_bytes(text)
    assert [record.text for record in read(tmp_path / "x.txt")] == ["하나", "둘", "three"]


ARRAY = [{"instruction": f'{number} ["{{\\', "output": '한 \n "\\\\" ]},' * number} for number in range(1, 30)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_of_records(tmp_path: Path, indent: int | None):
    content = json.dumps(ARRAY, indent=indent, ensure_ascii=indent is None)
    (tmp_path / "x.json").write_text("\ufeff" + content, encoding="utf-8")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("x.json", "x.json.gz"):
        records = read(tmp_path / name, keys=Keys("output", "instruction"))
        assert [(record.prompt, record.text) for record in records] == [tuple(record.values()) for record in ARRAY]


def test_values_of_a_json_array_that_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert read(path) == []
    path.write_text(f'[{{"text": "a"}}, 1, {{"text": "{"b" * 2000}"}}, {{"text": "c"}}]')
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    assert [getattr(record, "reason", "") for record in read(path)] == ["", "not_an_object", "too_large", ""]
    for content in ('[{"text": "a"}, {"text": ', '[{"text": "a"}] x', '["\\'):
        path.write_text(content)
        with pytest.raises(DataError, match=r"x\.json: not JSON \(.*line 1 column .*correct it, or write it as JSONL"):
            read(path)
    monkeypatch.setattr(readers, "_MAX_ARRAY_BYTES", 5)
    with pytest.raises(DataError, match="write it as JSONL, an object a line"):
        read(path)


def test_a_wrong_key_names_the_keys(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"no_text_key 'its keys: id, text'.*set text_key \(--text-key\) to one of"):
        tokenize(tmp_path / "out", path, text_key="content", max_bad_fraction=0.01)
    with pytest.raises(DataError, match="under the text_key 'content': no_text_key 'its keys: id, text'"):
        list(good_documents([str(path)], Keys("content")))
