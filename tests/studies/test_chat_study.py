"""The chat study: its texts, and its smallest form from text to table."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import DataError
from studies.chat import score
from studies.chat.make_chats import KOREAN_TASKS, NUMBERS, SYSTEM_PROMPTS, TASKS, write_texts
from studies.harness.study import load_study
from tests.data.helpers import PROJECT, contents, write_jsonl
from tests.files import read_jsonl
from tests.programs import study_command

WORDS = ["".join(parts) for parts in itertools.product("bdfg", "aeiou", ("lem", "rin", "sot"))]
HANGUL = ["".join(parts) for parts in itertools.product("가나다라마바", "고노도로모보")]
SIZES = {"chats": 140, "korean_chats": 40, "heldout": 14, "vocab_size": 480}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    for name, words in (("en/gutenberg", WORDS), ("ko/reviews", HANGUL)):
        (folder / name).parent.mkdir()
        texts = []
        for start in range(0, len(words), 2):
            texts.append(" ".join(words[start:] + words[:start]))
        write_jsonl(folder / f"{name}.jsonl.zst", texts)
    return folder


@pytest.fixture(scope="module")
def texts(data, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("made") / "texts"
    write_texts(folder, data, seed=3, **SIZES)
    return folder


def right_answer(task: str, asked: list[str]) -> str:
    """What follows from what the user said."""
    text = asked[-1]
    words = text.partition(": ")[2].split()
    options = dict(re.findall(r"(first|second|third) (\S+)[,.]", " ".join(asked)))
    place = text.split()[-1]
    if task == "copy":
        return " ".join(words)
    if task == "reverse":
        return " ".join(words[::-1])
    if task == "count":
        return " ".join(NUMBERS[: len(words)])
    if task in ("choose", "remember"):
        return f"{place} {options[place]}"
    assert task == "refuse", task
    return f"I cannot talk about {text.split()[5]}."


def check_answer(record: dict[str, Any]) -> None:
    """Checks that a chat's last message follows from what its user said."""
    messages = record["messages"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    assert messages[-1]["content"] == right_answer(record["task"], asked)


def is_korean(record: dict[str, Any]) -> bool:
    return re.search("[가-힣]", str(record)) is not None


def test_answers_follow_from_what_was_asked_and_held_out_chats_are_new(texts):
    train = read_jsonl(texts / "train.jsonl")
    english = read_jsonl(texts / "english.jsonl")
    korean = read_jsonl(texts / "korean.jsonl")
    assert (len(train), len(english), len(korean)) == (140, 14, 14)
    for record in (*train, *english, *korean):
        messages = record["messages"]
        has_system = messages[0]["role"] == "system"
        assert (messages[0]["content"] in SYSTEM_PROMPTS) == has_system
        roles = [message["role"] for message in messages[has_system:]]
        # What is to be remembered is asked for in a second turn.
        turns = 2 if record["task"] == "remember" else 1
        assert roles == ["user", "assistant"] * turns
        check_answer(record)

    known = [record["messages"] for record in train]
    for record in (*english, *korean):
        assert record["messages"] not in known, "a held-out chat is trained on"
    assert {record["task"] for record in english} == {*TASKS}
    assert {record["task"] for record in korean} == {*KOREAN_TASKS}

    # Few of the trained chats are Korean; prompts for self-generated chats are the others.
    not_korean = [record for record in train if not is_korean(record)]
    assert 0 < len(train) - len(not_korean) < 20
    assert read_jsonl(texts / "prompts.jsonl") == not_korean

    tuning = read_jsonl(texts / "korean_train.jsonl")
    assert len(tuning) == 40
    heldout = [record["messages"] for record in korean]
    for record in tuning:
        check_answer(record)
        assert record["messages"] not in heldout, "a held-out chat is trained on"
    assert all(is_korean(record) for record in (*korean, *tuning))


@pytest.mark.full
def test_the_same_arguments_give_the_same_bytes(texts, data, tmp_path):
    write_texts(tmp_path / "again", data, seed=3, **SIZES)
    assert [*contents(tmp_path / "again").values()] == [*contents(texts).values()]
    write_texts(texts, data, seed=3, **SIZES)
    with pytest.raises(
        DataError,
        match=r"expected the chats of .*'seed': 4.*, found .*'seed': 3.*choose another --output",
    ):
        write_texts(texts, data, seed=4, **SIZES)


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row below the head of a table in Markdown; the first and last are empty."""
    rows = []
    for line in table.splitlines()[2:]:
        rows.append([cell.strip() for cell in line.split("|")])
    return rows


@pytest.mark.full
def test_the_smallest_study_from_text_to_table(texts, tmp_path, monkeypatch, capsys):
    """With the chat vector, and a gated model with and without its gate."""
    monkeypatch.chdir(PROJECT)
    small = {"schedule": {"steps": 2}, "validation": {"every_steps": 2, "max_sequences": 2}}
    short_sample = {"sample": {"tokens": 600}}
    gate = {"tokens": 200, "max_open_fraction": 0.5, "negatives_file": None}

    # All stages on one rank; of the methods full fine-tuning, and Preserve with a gate.
    quick = PROJECT / "studies/configs/chat_quick.yaml"
    methods = dict.fromkeys(load_study(quick, texts).methods)
    del methods["fft_1e-3"]
    methods["preserve_self_generated"] = {"settings": {"gate": gate}}
    small_stage = {"ranks": 1, "settings": small}
    corpora = {"self_generated_chats": short_sample, "self_generated": short_sample}
    chats = {
        "extends": str(quick),
        "folder": str(tmp_path / "study"),
        "stages": {"pretrain": small_stage, "copies": small_stage, "chat": small_stage},
        "settings": {**small, "data": {"corpora": corpora}},
        "methods": methods,
    }
    plain = {
        "extends": str(PROJECT / "studies/configs/chat_plain.yaml"),
        "folder": str(tmp_path / "plain"),
        "base": str(tmp_path / "study" / "pretrain" / "hf"),
        "settings": small,
        "seeds": [1],
    }
    # Of the Korean methods the two whose open tokens have weights of their own.
    full_korean = PROJECT / "studies/configs/chat_korean.yaml"
    methods = dict.fromkeys(load_study(full_korean, texts).methods)
    # A base of two steps writes noise, of which too much looks like Korean.
    own_gate = {**gate, "negatives": ["english"]}
    methods["own_kl_korean"] = {"settings": {"gate": own_gate}}
    two_stages = [
        {"name": "language", "steps": 1, "weights": {"korean_chats": 0}},
        {"name": "chats", "steps": 1, "weights": {"korean": 1, "korean_chats": 3}},
    ]
    methods["own_tuned"] = {
        "settings": {"gate": own_gate, "stages": two_stages, "schedule": {"steps": 2}}
    }
    corpora = {**corpora, "self_generated_korean_chats": short_sample}
    korean = {
        "extends": str(full_korean),
        "folder": str(tmp_path / "korean"),
        "base": str(tmp_path / "study" / "chat" / "hf"),
        "scratch": None,
        "stages": {"pretrain": None, "copies": None, "chat": None},
        "settings": {**small, "data": {"corpora": corpora}},
        "methods": methods,
        "seeds": [1],
    }

    for name, values in (("study", chats), ("plain", plain), ("korean", korean)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        done = study_command("run", tmp_path / f"{name}.yaml", "--data", texts)
        assert done.returncode == 0, done.stderr
    arguments = [tmp_path / "study", "--texts", texts, "--plain", tmp_path / "plain"]
    arguments += ["--max-bytes", 4000]
    monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
    score.main()
    table = (tmp_path / "study" / "chats.md").read_text()
    assert table in capsys.readouterr().out
    rows = rows_of(table)
    assert [row[1] for row in rows] == [
        "Base",
        "Full fine-tuning, 1e-3",
        "Preserve 1/2, self-generated text",
        "Preserve 1/2, self-generated text + gate",
        "Chat vector",
    ]
    assert all(line.count("|") == 12 for line in table.splitlines())
    has_answers_as_the_base = [row[-2] != "" for row in rows]
    assert has_answers_as_the_base == [False, False, False, True, False], "of the gated one alone"
    monkeypatch.setattr(score, "score_chats", None)  # what was scored is not scored again
    score.main()
    assert (tmp_path / "study" / "chats.md").read_text() == table
    monkeypatch.undo()
    monkeypatch.chdir(PROJECT)
    arguments = [tmp_path / "korean", "--texts", texts, "--max-bytes", 4000]
    monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
    score.main()
    table = (tmp_path / "korean" / "chats.md").read_text()
    assert [row[1] for row in rows_of(table)] == [
        "Base",
        "Adapt 1/8 with open weights, tuned on Korean chats + gate",
        "Adapt 1/8 with open weights, own chats by KL, half with Korean users + gate",
    ], "no export without the gate of open weights"
