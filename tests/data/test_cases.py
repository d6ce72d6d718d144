"""Texts as people bring them: small files made after faults that users of other projects reported.

Each case of tests/cases is read, or refused in a line that says what to do.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.sources.records import Keys, Rejected
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenize.queue import QUARANTINE
from pipeline.data.tokenize.units import beginning_of, input_files, sampled_documents
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError, printable
from tests.data.helpers import documents, read, texts_in, texts_of, tokenize, write_jsonl
from tests.files import read_jsonl
from tests.programs import scale_cpt
from tests.texts import DATA

CASES = Path(__file__).parents[1] / "cases"


class Expected(NamedTuple):
    """How many documents a file gives, and what is said about it: of a rejected record, or as an error."""

    documents: int | None = None
    rejected: int = 0
    said: str = ""
    keys: Keys = Keys()


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


# --- Tables ----------------------------------------------------------------------------------------------------------


def test_a_stray_quote_of_a_csv_costs_the_lines_that_it_takes(tmp_path: Path):
    """A pair of stray quotes far apart looks like one field; its lines look like rows, and are counted one by one."""
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


# --- Compressed files ------------------------------------------------------------------------------------------------


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


# --- Names -----------------------------------------------------------------------------------------------------------


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


# --- JSON of other shapes --------------------------------------------------------------------------------------------


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


# --- What the tokenizer makes of a text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "foreign_eos",
            r"config\.json: eos_token_id: expected an id of the tokenizer, below 600, found 128001",
        ),
        (
            "missing_eos",
            r"tokenizer_config\.json: eos_token: expected a token of the tokenizer, found '<\|im_end\|>'",
        ),
        (
            "no_unk",
            r"characters become nothing, more than max_unknown_fraction 0\.01 allows; take a tokenizer that has",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, name: str, said: str):
    texts = write_jsonl(tmp_path / "x.jsonl", ["가격은 twenty 원입니다 and more"] * 40)
    with pytest.raises(DataError, match=said):
        tokenize(tmp_path / "out", texts, tokenizer=CASES / "tokenizers" / name)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_what_cannot_be_spelled_is_counted_and_may_be_allowed(tmp_path: Path):
    texts = write_jsonl(tmp_path / "x.jsonl", ["ab 가격 가", "ab"])
    settings = {"tokenizer": CASES / "tokenizers" / "no_unk", "max_unknown_fraction": 0.5}
    made = tokenize(tmp_path / "out", texts, **settings)
    assert (made.characters, made.lost_characters) == (9, 3)
    described = json.loads((CASES / "tokenizers" / "no_unk" / "tokenizer.json").read_text())
    described["model"]["unk_token"] = "</s>"
    shutil.copytree(CASES / "tokenizers" / "no_unk", tmp_path / "unk")
    (tmp_path / "unk" / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="tokens are unknown, more than max_unknown_fraction"):
        tokenize(tmp_path / "other", texts, tokenizer=tmp_path / "unk")


def test_a_tokenizer_of_bytes_spells_everything_and_one_of_letters_what_it_has(tmp_path: Path):
    """Also letters that join with those before them to one token, as `an` does."""
    source = write_jsonl(tmp_path / "x.jsonl", ["ab an banana, 한국어 문장 👩‍👩‍👧 \u200b é"])
    settings = {"tokenizer": DATA / "tokenizers" / "20B_tokenizer.json"}
    assert tokenize(tmp_path / "bytes", source, **settings).unknown_fraction == 0
    described = json.loads((DATA / "tokenizers" / "20B_tokenizer.json").read_text())
    gone = [
        piece for piece in described["model"]["vocab"] if "Ń" in piece
    ]  # of a byte that Hangul has
    for piece in gone:
        del described["model"]["vocab"][piece]
    merges = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in described["model"]["merges"]
    ]
    described["model"]["merges"] = [
        pair for pair in merges if not any("Ń" in piece for piece in pair)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    plain = write_jsonl(tmp_path / "y.jsonl", ["ab an banana", "and an apple"])
    assert (
        tokenize(tmp_path / "letters", plain, tokenizer=tmp_path / "tokenizer.json").lost_characters
        == 0
    )


@pytest.mark.parametrize("name", ["bos", "strike"])
def test_text_that_spells_special_tokens_stays_text_and_is_counted(tmp_path: Path, name: str):
    source = CASES / "09_special" / f"{name}.jsonl"
    texts = texts_of(source)
    spelled = sum(text.count("<s>") + text.count("</s>") for text in texts)
    made = tokenize(tmp_path / "text", source)
    assert (made.special_tokens, made.special_tokens_spelled) == ("text", spelled)
    corpus = TokenCorpus(tmp_path / "text")
    ids = corpus.read(0, corpus.tokens).tolist()
    assert (ids.count(1), ids.count(2)) == (20, 20)  # those around the documents alone
    assert texts_in(tmp_path / "text") == texts
    control = tokenize(tmp_path / "control", source, special_tokens="control")
    assert (control.special_tokens, control.special_tokens_spelled) == ("control", spelled)
    assert control.tokens < made.tokens


def test_text_that_is_not_composed_is_counted_and_composed_where_asked(tmp_path: Path):
    decomposed = unicodedata.normalize("NFD", "한국어 문장")
    path = write_jsonl(tmp_path / "x.jsonl", [decomposed, "한국어", "ascii"])
    assert tokenize(tmp_path / "out", path).decomposed_documents == 1
    assert tokenize(tmp_path / "nfc", path, normalize="nfc").decomposed_documents == 0
    assert texts_in(tmp_path / "nfc") == ["한국어 문장", "한국어", "ascii"]


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_a_copy_that_differs_in_blanks_or_form_is_held_out_with_its_text(fraction: float):
    for text in [f"{number}번째 글, 다른 글" for number in range(50)]:
        copies = [
            f"{text}\n",
            text.replace(" ", "  "),
            f" {text}",
            unicodedata.normalize("NFD", text),
        ]
        assert {is_heldout(copy, fraction) for copy in copies} == {is_heldout(text, fraction)}


def test_escape_sequences_are_not_printed(tmp_path: Path):
    text = "red \x1b[31mtext\x1b]0;title\x07 and \u202eback"
    assert printable(text) == r"red \x1b[31mtext\x1b]0;title\x07 and \u202eback"
    tokenize(tmp_path / "out", write_jsonl(tmp_path / "x.jsonl", [text]))
    shown = scale_cpt(
        "inspect-data", tmp_path / "out", "--tokenizer", "examples/data/models/stories260K"
    ).stdout
    assert "\x1b" not in shown and r"\x1b[31m" in shown


# --- Chats -----------------------------------------------------------------------------------------------------------

CHATS = {
    "dated": Expected(30),
    "inject": Expected(0, 3, r"message 0: spells <\|im_end\|>, a special token"),
    "shape_Capital": Expected(0, 2, "no_answer .*roles: User, Assistant"),
    "shape_empty_user": Expected(2),
    "shape_ends_with_end": Expected(0, 2, r"message 1: spells <\|im_end\|>"),
    "shape_function_call": Expected(
        0, 2, "message 1: from: expected one of human, .* found 'function_call'"
    ),
    "shape_greeting_first": Expected(2),
    "shape_model_role": Expected(0, 2, "no_answer .*roles: user, model"),
    "shape_nul": Expected(0, 2, r"(?s)prompt_not_usable .*message 1: nul_character"),
    "shape_null_tool": Expected(0, 2, "message 1: content: expected a string, found NoneType"),
    "shape_parts": Expected(0, 2, "message 1: content: expected a string, found list"),
    "shape_spaces": Expected(2),
    "shape_string": Expected(0, 2, "expected a list, found str"),
    "shape_system_sharegpt": Expected(2),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_framed_or_its_message_is_named(tmp_path: Path, name: str):
    expected = CHATS[name]
    path = tmp_path / f"{name}.jsonl"
    usable = (
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    path.write_text((CASES / "15_chat" / f"{name}.jsonl").read_text() + usable)
    tokenizer = CASES / "15_chat" / ("dated" if name == "dated" else "chatml")
    made = tokenize(tmp_path / "out", path, tokenizer=tokenizer, messages_key="messages")
    assert (made.documents - 1, sum(made.rejected.values())) == (
        expected.documents,
        expected.rejected,
    )
    if expected.rejected:
        first = read_jsonl(tmp_path / "out" / QUARANTINE)[0]
        with pytest.raises(DataError, match=expected.said):
            raise DataError(f"{first['reason']} {first['excerpt']} {first['detail']}")


def test_every_chat_has_an_expected_outcome():
    assert {path.stem for path in (CASES / "15_chat").glob("*.jsonl")} == {*CHATS}


def test_a_template_that_asks_for_the_date_gives_the_same_tokens_on_any_day(tmp_path: Path):
    folder = CASES / "15_chat" / "dated"
    tokenize(
        tmp_path / "out",
        CASES / "15_chat" / "dated.jsonl",
        tokenizer=folder,
        messages_key="messages",
    )
    shard, document = TokenCorpus(tmp_path / "out").locate_document(0)
    assert "Today is 01 Jan 2025 00:00:00" in load_tokenizer(folder).decode(
        shard.document(document)
    )


def test_messages_of_weight_zero_are_only_read(tmp_path: Path):
    def turn(role: str, content: str, **more: object) -> dict[str, object]:
        return {"role": role, "content": content, **more}

    chats = [
        [
            turn("user", "q"),
            turn("assistant", "skipped", weight=0),
            turn("user", "r"),
            turn("assistant", "b", weight=1),
        ],
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "skipped", "weight": 0}],
        [turn("user", "q"), turn("assistant", "skipped", train=False)],
        [turn("user", "q"), turn("assistant", "half", weight=0.5)],
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    folder = CASES / "15_chat" / "chatml"
    made = tokenize(tmp_path / "out", path, tokenizer=folder, messages_key="messages")
    assert made.rejected == {"no_answer": 2, "messages_not_usable": 1}
    shard, document = TokenCorpus(tmp_path / "out").locate_document(0)
    assert made.documents == 1
    ids, tokenizer = shard.document(document), load_tokenizer(folder)
    prompt = shard.prompt_mask(0, len(ids))
    assert "skipped" in tokenizer.decode(ids[prompt]) and "skipped" not in tokenizer.decode(
        ids[~prompt]
    )


# --- Jobs and samples ------------------------------------------------------------------------------------------------


def test_after_a_wrong_text_key_the_right_one_begins_anew(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a text"}\n' * 20)
    with pytest.raises(DataError, match=r"its keys: body.*set text_key"):
        tokenize(tmp_path / "out", path, max_bad_fraction=0.1)
    assert tokenize(tmp_path / "out", path, text_key="body").documents == 20
    with pytest.raises(DataError, match="begun with another text key"):
        tokenize(tmp_path / "out", path)


def test_a_table_without_rows_is_the_beginning_of_nothing(tmp_path: Path):
    schema = pa.schema([("text", pa.string())])
    pq.ParquetWriter(tmp_path / "x.parquet", schema).close()
    unit, size = beginning_of(tmp_path / "x.parquet", Keys(), 1000)
    assert (unit.size, size) == (0, 0.0)


def test_an_indented_line_that_orjson_refuses_is_read(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n  {"text": "b", "x": NaN}\n')
    assert tokenize(tmp_path / "out", path).documents == 2


@pytest.mark.parametrize("rows", [100, 2500])
def test_a_sample_of_parquet_holds_what_was_asked_for(tmp_path: Path, rows: int):
    texts = [f"{number} " + "word " * 200 for number in range(5000)]
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=rows, compression="none"
    )
    wanted = 2**20
    documents_, factor = sampled_documents([str(tmp_path / "x.parquet")], Keys(), wanted)
    taken = sum(document.utf8_bytes for document in documents_)
    assert wanted * 0.9 < taken < wanted * 1.3
    assert factor == pytest.approx(sum(map(len, texts)) / taken, rel=0.1)


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
