"""Damaged input files: a typed error of one line, or rejected records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from pipeline.data import readers
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
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "expected names of the same folder, found '../x.arrow'"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow: no such file"),
        ('{"_data_files": [{"name": "x.arrow"}]}', r"_data_files.0.filename: Field required"),
        ('{"_data_files": 3}', "_data_files: Input should be a valid list"),
        ("[]", "state.json: expected a JSON object"),
        ("nonsense", "not JSON"),
    ],
)
def test_a_damaged_list_of_a_saved_dataset(tmp_path: Path, content: str, message: str):
    (saved(tmp_path / "saved") / "state.json").write_text(content)
    with pytest.raises(DataError, match=message):
        input_files([str(tmp_path / "saved")])


def test_splits_of_a_saved_dataset_outside_of_it(tmp_path: Path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": [".."]}')
    with pytest.raises(DataError, match=r"expected names of the same folder, found '\.\.'"):
        input_files([str(tmp_path)])


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


@pytest.mark.parametrize("block", [9, 64, 2**18])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_of_records(tmp_path: Path, block: int, indent: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "_ARRAY_BLOCK_BYTES", block)
    content = json.dumps(ARRAY, indent=indent, ensure_ascii=indent is None)
    (tmp_path / "x.json").write_text("\ufeff" + content, encoding="utf-8")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("x.json", "x.json.gz"):
        records = read(tmp_path / name, keys=Keys("output", "instruction"))
        assert [(record.prompt, record.text) for record in records] == [tuple(record.values()) for record in ARRAY]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", []),
        ('[{"text": "a"}, 1, {"text": "b"}]', ["not_an_object"]),
        ('[{"text": "a"}, {"text": ', ["malformed_json"]),
        ('[{"text": "a"}] x', ["malformed_json"]),
        ('[{"text": "a"]]', ["malformed_json"]),
        ('["\\', ["malformed_json"]),
        ('[{"text": "a"}, {"text": "' + "b" * 34_000_000 + '"}, {"text": "c"}]', ["too_large"]),
    ],
)
def test_damaged_json_arrays(tmp_path: Path, content: str, expected: list[str]):
    (tmp_path / "x.json").write_text(content)
    records = read(tmp_path / "x.json")
    assert reasons(records) == expected
    assert len(records) == len(expected) + content.count('"a"}') + content.count('"b"}') + content.count('"c"}')


def test_a_wrong_key_names_the_keys(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"no_text_key 'its keys: id, text'.*set text_key \(--text-key\) to one of"):
        tokenize(tmp_path / "out", path, text_key="content", max_bad_fraction=0.01)
    with pytest.raises(DataError, match="under the text_key 'content': no_text_key 'its keys: id, text'"):
        list(good_documents([str(path)], Keys("content")))


def test_a_deep_value_in_place_of_text(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"text": ' + "[" * 1000 + "]" * 1000 + "}\n")
    assert read(tmp_path / "x.jsonl") == [Rejected(0, "text_not_string", b"list")]
