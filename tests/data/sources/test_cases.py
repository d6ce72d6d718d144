"""Texts as people bring them: small files made after faults that users of other projects reported.

Each case of tests/cases is read, or refused in a line that says what to do.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.sources.records import Keys, Rejected
from pipeline.data.tokenize.input_files import input_files
from pipeline.errors import DataError
from tests.data.helpers import CASES, Expected, documents, read, texts_of, tokenize, write_jsonl
from tests.programs import scale_cpt

DOCUMENT = Keys("document")
FILES = {
    "01_tsv_quotes/ratings.tsv": Expected(300, keys=DOCUMENT),
    "01_tsv_quotes/semicolon.csv": Expected(50),
    "01_tsv_quotes/stray.csv": Expected(298, 2, "malformed_csv"),
    "01_tsv_quotes/twice.csv": Expected(said=r"has several columns 'text'; rename all but one"),
    "01_tsv_quotes/unclosed.csv": Expected(
        said=r"row 41: a quotation mark is not closed, and 260 lines follow it"
    ),
    "02_python_json/bigint.jsonl": Expected(20),
    "02_python_json/dupkeys.jsonl": Expected(20),
    "02_python_json/nan.jsonl": Expected(20),
    "02_python_json/surrogate.jsonl": Expected(19, 1, r"lone_surrogate .*surrogates not allowed"),
    "03_compressed/empty.jsonl.gz": Expected(0),
    "03_compressed/magicless.jsonl.gz": Expected(
        said=r"compressed as \.gz by its name, found other bytes; rename"
    ),
    "03_compressed/padded.jsonl.gz": Expected(300),
    "03_compressed/padding.jsonl.xz": Expected(300),
    "03_compressed/pzstd.jsonl.zst": Expected(300),
    "03_compressed/really_gz.jsonl": Expected(
        said=r"not compressed by its name, found \.gz; rename it so"
    ),
    "03_compressed/seekable.jsonl.zst": Expected(300),
    "08_shapes/array.jsonl": Expected(60),
    "08_shapes/columns.json": Expected(0, 1, "text_not_string 'dict'"),
    "08_shapes/cr.jsonl": Expected(60),
    "08_shapes/cr.txt": Expected(60),
    "08_shapes/data.json": Expected(0, 1, "no_text_key 'its keys: version, data'"),
    "08_shapes/glued.jsonl": Expected(60),
    "08_shapes/nested.jsonl": Expected(60, keys=Keys("meta.body")),
    "08_shapes/pretty.json": Expected(1),
    "08_shapes/pretty.jsonl": Expected(60),
    "08_shapes/strings.jsonl": Expected(0, 60, r"not_an_object .*found str, expected an object"),
    "08_shapes/textlist.jsonl": Expected(0, 60, "text_not_string 'list'"),
    "09_special/bos.jsonl": Expected(20),
    "09_special/strike.jsonl": Expected(20),
}


def test_every_file_has_an_expected_outcome():
    kinds = ("01_tsv_quotes", "02_python_json", "03_compressed", "08_shapes", "09_special")
    found = {str(path.relative_to(CASES)) for kind in kinds for path in (CASES / kind).iterdir()}
    assert found == {*FILES}


@pytest.mark.parametrize("unit_bytes", [500, 10**9])
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused(name: str, unit_bytes: int):
    expected = FILES[name]
    if expected.documents is None:
        with pytest.raises(DataError, match=rf"{name.rpartition('/')[2]}: .*{expected.said}"):
            read(CASES / name, keys=expected.keys, unit_bytes=unit_bytes)
        return
    found = read(CASES / name, keys=expected.keys, unit_bytes=unit_bytes)
    rejected = [record for record in found if isinstance(record, Rejected)]
    assert (len(found) - len(rejected), len(rejected)) == (expected.documents, expected.rejected)
    if rejected:
        with pytest.raises(DataError, match=expected.said):
            raise DataError(str(rejected[0]))


# --- Tables ---------------------------------------------------------------------------------------


def test_a_stray_quote_of_a_csv_costs_the_lines_that_it_takes(tmp_path: Path):
    """A pair of stray quotes far apart looks like one field; its lines look like rows, and are
    counted one by one."""
    rows = [f"{number},row {number}" for number in range(300)]
    rows[50], rows[250] = '50,"opened', '250,closed"'
    (tmp_path / "x.csv").write_text("\n".join(["id,text", *rows]))
    found = texts_of(tmp_path / "x.csv")
    assert found.count("malformed_csv") == 201
    assert len(found) == 300
    as_lines = texts_of(tmp_path / "x.csv", keys=Keys(quoting="none"))
    assert (as_lines[50], as_lines[250], len(as_lines)) == ('"opened', 'closed"', 300)
    with pytest.raises(DataError, match="201 of 300 records are bad"):
        tokenize(tmp_path / "out", tmp_path / "x.csv", max_bad_fraction=0.1)


def test_a_quoted_text_of_many_lines_is_one_document(tmp_path: Path):
    poem = "\n".join(
        f"line {number}, and more" if number % 3 == 0 else f"line {number}" for number in range(40)
    )
    (tmp_path / "x.csv").write_text(f'id,text\n1,"{poem}"\n2,short\n')
    assert texts_of(tmp_path / "x.csv") == [poem, "short"]


PROSE = "Once upon a time, there was a girl who lived by the sea."
SALES = "\n".join(f"{month},{month * 70}" for month in range(1, 30))
TEXTS_OF_MANY_LINES = {
    "prose": ["id,text", f'1,"{chr(10).join([PROSE] * 12)}"', "2,short"],
    "several commas": ["id,text", f'1,"{chr(10).join(["one, two, and three"] * 12)}"'],
    "Korean before a label": [
        "text,label",
        f'"{chr(10).join(["오늘은 날씨가 좋아서, 바다로 갔다."] * 15)}",뉴스',
        "짧다,뉴스",
    ],
    "an only column": ["text", f'"{chr(10).join(["a, b"] * 15)}"'],
    "a dialog under a numbered title": [
        "title,text",
        f'Dialog 1,"They met.{chr(10)}{chr(10).join(["Speaker 1, a dog"] * 15)}"',
    ],
    "a table of its own": [
        "id,text",
        *(f"{number},short" for number in range(5)),
        f'5,"Sales by month:{chr(10)}{SALES}"',
    ],
    "a table of its own, with a sentence behind it": [
        "id,text",
        f'1,"x{chr(10)}{SALES}{chr(10)}."',
    ],
}


@pytest.mark.parametrize("name", TEXTS_OF_MANY_LINES)
def test_a_text_whose_lines_have_commas_is_one_document(tmp_path: Path, name: str):
    rows = TEXTS_OF_MANY_LINES[name]
    (tmp_path / "x.csv").write_text("\n".join([*rows, ""]), encoding="utf-8")
    found = texts_of(tmp_path / "x.csv")
    assert len(found) == len(rows) - 1 and "malformed_csv" not in found
    assert max(found, key=len) in "\n".join(rows)
    assert max(found, key=len).count("\n") > 10


def test_a_row_of_many_cells_of_two_lines_is_one_document(tmp_path: Path):
    names = ",".join(f"c{number}" for number in range(9))
    cells = ",".join(f'"a{number}\nb"' for number in range(9))
    (tmp_path / "x.csv").write_text(f'text,{names}\n"hello\nthere",{cells}\n')
    assert texts_of(tmp_path / "x.csv") == ["hello\nthere"]


ROWS_TO_TAKE = {
    "an index": ("id,text", "{number},row {number}"),
    "numbers": ("score,text", "0.{number},row {number}"),
    "dates": ("date,text", "2024-01-{number},row {number}"),
    "numbered names": ("name,text", "doc_{number},row {number}"),
    "hashes": ("id,text", "{number:x}d5a7f0c1e9,row {number}"),
    "labels": ("text,label", "row {number} of words,news"),
    "several columns": ("id,text,source,year", "{number},row {number},web,2024"),
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ROWS_TO_TAKE)
def test_a_stray_quote_is_found_by_what_the_other_columns_hold(tmp_path: Path, name: str, end: str):
    header, row = ROWS_TO_TAKE[name]
    rows = [row.format(number=number) for number in range(100, 160)]
    opening = rows[20].index("row")
    rows[20] = rows[20][:opening] + '"' + rows[20][opening:]
    after = rows[40].find(",", rows[40].index("row"))
    closing = len(rows[40]) if after < 0 else after
    rows[40] = rows[40][:closing] + '"' + rows[40][closing:]
    (tmp_path / "x.csv").write_text(end.join([header, *rows]), newline="")
    found = texts_of(tmp_path / "x.csv")
    assert (found.count("malformed_csv"), len(found)) == (21, 60)


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
@pytest.mark.parametrize("blank", ["\n", "\r\n", "\ufeff\n \n"])
def test_empty_lines_before_the_names_of_columns_are_no_rows(tmp_path: Path, name: str, blank: str):
    path = tmp_path / name
    rows = ["id,text", "1,one", "", "2,two"]
    content = "\n".join(rows).replace(",", "," if name == "x.csv" else "\t")
    path.write_text(blank + content, encoding="utf-8", newline="")
    assert texts_of(path) == ["one", "two"]
    for empty in ("\n\n", '"",""\n1,one\n' if name == "x.csv" else "\t\n"):
        path.write_text(empty)
        with pytest.raises(DataError, match=f"{path}: expected the names of columns in its first"):
            texts_of(path)


# --- Compressed files -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz"])
def test_zeros_between_and_behind_members_are_passed_over(tmp_path: Path, suffix: str):
    compress = gzip.compress if suffix.endswith("gz") else lzma.compress
    path = tmp_path / f"x{suffix}"
    first, second = (compress(b'{"text": "%d"}\n' % number) for number in (1, 2))
    path.write_bytes(first + bytes(10_000) + second + bytes(8))
    assert texts_of(path) == ["1", "2"]
    if suffix.endswith("xz"):
        path.write_bytes(first + bytes(3))  # xz -dc: Compressed data is corrupt
        with pytest.raises(DataError, match="is damaged after"):
            read(path)


def test_a_damaged_file_is_named_on_the_screen_and_read_only_if_allowed(tmp_path: Path):
    whole = gzip.compress(
        b"".join(b'{"text": "document %d"}\n' % number for number in range(50_000))
    )
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    command = (
        "tokenize",
        "--input",
        path,
        "--tokenizer",
        CASES.parents[1] / "examples" / "data" / "models" / "stories260K",
    )
    ended = scale_cpt(*command, "--output", tmp_path / "out", "--workers", "1")
    assert ended.returncode == 1
    assert f"error: {path}: is truncated after" in ended.stderr and ended.stderr.count("error") == 1
    allowed = scale_cpt(*command, "--output", tmp_path / "out", "--workers", "1", "--allow-damaged")
    assert allowed.returncode == 0, allowed.stderr
    assert "1 records rejected" in allowed.stdout


# --- Names ----------------------------------------------------------------------------------------


def test_names_with_brackets_capitals_and_hangul_are_read(tmp_path: Path):
    folder = tmp_path / "[raw] set (1)" / "한글"
    folder.mkdir(parents=True)
    for name in ("a b[1].jsonl", "UPPER.JSONL"):
        write_jsonl(folder / "x.jsonl", documents(3)).rename(folder / name)
    write_jsonl(folder / "z.jsonl.gz", documents(3)).rename(folder / "Z.JSONL.GZ")
    assert len(input_files([f"{folder}/*"])) == 3
    assert len(input_files([f"{tmp_path}/*set*/**/*.jsonl"])) == 1
    assert texts_of(folder / "Z.JSONL.GZ") == texts_of(folder / "UPPER.JSONL") == documents(3)


def test_a_name_that_is_not_utf8_is_refused_in_a_line(tmp_path: Path):
    name = os.fsencode(tmp_path) + b"/" + "가격.jsonl".encode("cp949")
    with open(name, "wb") as file:  # noqa: PTH123  # a name of bytes
        file.write(b'{"text": "a"}\n')
    with pytest.raises(
        DataError, match=r"\\xb0\\xa1\\xb0\\xdd\.jsonl: its name is not UTF-8; rename it"
    ):
        input_files([f"{tmp_path}/*.jsonl"])
    tool = (
        "tokenize",
        "--tokenizer",
        "examples/data/models/stories260K",
        "--output",
        tmp_path / "out",
    )
    ended = scale_cpt(*tool, "--input", f"{tmp_path}/*.jsonl")
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "spelling", "folder link"])
def test_a_file_is_named_once_however_it_is_spelled(tmp_path: Path, kind: str):
    first = write_jsonl(tmp_path / "a.jsonl", documents(2))
    second = {"spelling": tmp_path / "." / ".." / tmp_path.name / "a.jsonl"}.get(
        kind, tmp_path / "b.jsonl"
    )
    if kind == "symlink":
        second.symlink_to(first)
    elif kind == "hard link":
        second.hardlink_to(first)
    elif kind == "folder link":
        (tmp_path / "c").symlink_to(tmp_path)
        second = tmp_path / "c" / "a.jsonl"
    with pytest.raises(
        DataError,
        match=r"is named twice among the inputs, also as .*a\.jsonl, which is the same file",
    ):
        input_files([str(first), str(second)])


def test_a_name_in_another_form_of_unicode_is_said(tmp_path: Path):
    folder = tmp_path / unicodedata.normalize("NFD", "말뭉치")
    folder.mkdir()
    write_jsonl(folder / "x.jsonl", ["a"])
    for name in ("x.jsonl", "*.jsonl"):
        with pytest.raises(DataError, match="one of the same letters is spelled in Unicode's NFD"):
            input_files([f"{tmp_path}/말뭉치/{name}"])


def saved(folder: Path, texts: list[str], **columns: list[Any]) -> Path:
    """A folder as `datasets` saves it: batches in Arrow's format for streams, and what they are."""
    folder.mkdir(parents=True)
    table = pa.table({"text": texts, **columns})
    names = []
    for number, rows in enumerate((table.slice(0, 5), table.slice(5))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with (
            pa.OSFile(str(folder / names[-1]), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(rows, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("unit_bytes", [1, 10**9])
def test_a_folder_that_datasets_saved_is_read(tmp_path: Path, unit_bytes: int):
    texts = documents(12)
    folder = saved(tmp_path / "one", texts, meta=[{"body": text} for text in texts])
    assert texts_of(folder, unit_bytes=unit_bytes) == texts
    assert texts_of(folder, keys=Keys("meta.body"), unit_bytes=unit_bytes) == texts
    (tmp_path / "splits").mkdir()
    saved(tmp_path / "splits" / "train", texts)
    listed = tmp_path / "splits" / "dataset_dict.json"
    listed.write_text('{"splits": ["train"]}')
    assert texts_of(tmp_path / "splits") == texts
    listed.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match=r"several splits; name one of them: .*/splits/train, .*/splits/test"
    ):
        read(tmp_path / "splits")
    with pa.OSFile(
        str(tmp_path / "x.arrow"), "wb"
    ) as file:  # the format for files, which Polars and R write
        table = pa.table({"text": texts})
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    assert texts_of(tmp_path / "x.arrow", unit_bytes=unit_bytes) == texts
    content = (tmp_path / "x.arrow").read_bytes()
    (tmp_path / "x.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged or not a complete Arrow file"):
        read(tmp_path / "x.arrow")


def test_nested_columns_of_parquet_and_keys_that_are_not_there(tmp_path: Path):
    texts = documents(20)
    pq.write_table(
        pa.table({"meta": [{"body": text, "n": 1} for text in texts]}), tmp_path / "x.parquet"
    )
    assert texts_of(tmp_path / "x.parquet", keys=Keys("meta.body"), unit_bytes=1) == texts
    for key in ("meta.title", "meta.body.x", "other.body"):
        with pytest.raises(
            DataError, match=f"has no column '{key}'; set --text-key to one of: meta"
        ):
            read(tmp_path / "x.parquet", keys=Keys(key))
    (tmp_path / "x.jsonl").write_text(
        '{"meta": {"body": "nested"}, "meta.body": "named so"}\n{"meta": "no object"}\n'
    )
    assert texts_of(tmp_path / "x.jsonl", keys=Keys("meta.body")) == ["named so", "no_text_key"]


# --- JSON of other shapes -------------------------------------------------------------------------


def test_lines_of_arrays_are_no_array_of_records(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('[{"text": "a"}]\n[{"text": "b"}]\n')
    assert texts_of(path) == ["not_an_object", "not_an_object"]
    path.write_text('[{"text": "a"},\n{"text": "b", "score": NaN}]')
    assert texts_of(path) == ["a", "b"]


def test_objects_behind_one_that_is_malformed_are_read(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('{\n "text": "a"\n}\n{\n "text": bad\n}\n{\n "text": "c"\n}\n')
    assert texts_of(path) == ["a", "malformed_json", "c"]
    (tmp_path / "x.jsonl").write_text(
        '{"text": "a"}{"text": "b"}\n{"text": "c"} "d"\n{"text": "e\\ud83d"}\n'
    )
    assert texts_of(tmp_path / "x.jsonl") == ["a", "b", "malformed_json", "lone_surrogate"]


def test_an_indented_line_that_orjson_refuses_is_read(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n  {"text": "b", "x": NaN}\n')
    assert tokenize(tmp_path / "out", path).documents == 2


def test_config_init_names_the_keys_that_it_finds(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a text", "id": 3}\n' * 20)
    tool = (
        "config",
        "init",
        "--base",
        "examples/data/models/stories260K",
        "--new",
        path,
        "--old",
        path,
        "--gpus",
        "1",
    )
    ended = scale_cpt(*tool, "--output", tmp_path / "run.yaml")
    assert ended.returncode == 1 and "its keys: body, id" in ended.stderr
