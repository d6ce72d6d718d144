"""The chat study: its texts, and its smallest form from text to table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.errors import DataError
from studies.chat import score
from studies.chat.make_chats import KOREAN_TASKS, NUMBERS, SYSTEM_PROMPTS, TASKS, write_texts
from studies.harness.study import load_study
from tests.data.helpers import PROJECT, contents, write_jsonl
from tests.files import read_jsonl
from tests.programs import study_command

WORDS = [f"{a}{b}{c}" for a in "bdfg" for b in "aeiou" for c in ("lem", "rin", "sot")]
HANGUL = [f"{a}{b}" for a in "가나다라마바" for b in "고노도로모보"]
SIZES = {"chats": 140, "korean_chats": 40, "heldout": 14, "vocab_size": 480}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    for name, words in (("en/gutenberg", WORDS), ("ko/reviews", HANGUL)):
        (folder / name).parent.mkdir()
        texts = [" ".join(words[at:] + words[:at]) for at in range(0, len(words), 2)]
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
    return {
        "copy": lambda: " ".join(words),
        "reverse": lambda: " ".join(words[::-1]),
        "count": lambda: " ".join(NUMBERS[: len(words)]),
        "choose": lambda: f"{place} {options[place]}",
        "remember": lambda: f"{place} {options[place]}",
        "refuse": lambda: f"I cannot talk about {text.split()[5]}.",
    }[task]()


def test_answers_follow_from_what_was_asked_and_held_out_chats_are_new(texts):
    train, english, korean, prompts = (
        read_jsonl(texts / f"{name}.jsonl") for name in ("train", "english", "korean", "prompts")
    )
    assert [len(one) for one in (train, english, korean)] == [140, 14, 14]
    for record in (*train, *english, *korean):
        messages = record["messages"]
        has_system = messages[0]["role"] == "system"
        assert (messages[0]["content"] in SYSTEM_PROMPTS) == has_system
        roles = [message["role"] for message in messages[has_system:]]
        assert roles == ["user", "assistant"] * (2 if record["task"] == "remember" else 1)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        assert messages[-1]["content"] == right_answer(record["task"], asked)
    known = [record["messages"] for record in train]
    assert not [record for record in (*english, *korean) if record["messages"] in known]
    assert {record["task"] for record in english} == {*TASKS} and {
        record["task"] for record in korean
    } == {*KOREAN_TASKS}
    is_korean = [bool(re.search("[가-힣]", str(record))) for record in train]
    assert 0 < sum(is_korean) < 20
    assert prompts == [
        record for record, korean in zip(train, is_korean, strict=True) if not korean
    ]
    tuning = read_jsonl(texts / "korean_train.jsonl")
    assert len(tuning) == 40
    for record in tuning:
        asked = [message["content"] for message in record["messages"] if message["role"] == "user"]
        assert record["messages"][-1]["content"] == right_answer(record["task"], asked)
    assert all(re.search("[가-힣]", str(record)) for record in (*korean, *tuning))
    heldout = [record["messages"] for record in korean]
    assert not [record for record in tuning if record["messages"] in heldout]


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


@pytest.mark.full
def test_the_smallest_study_from_text_to_table(texts, tmp_path, monkeypatch, capsys):
    """With the chat vector, and a gated model with and without its gate."""
    monkeypatch.chdir(PROJECT)
    small = {"schedule": {"steps": 2}, "validation": {"every_steps": 2, "max_sequences": 2}}
    kept = ("fft_1e-3", "preserve_self_generated")
    quick = PROJECT / "studies/configs/chat_quick.yaml"
    changes = {
        "extends": str(quick),
        "folder": str(tmp_path / "study"),
        "stages": {
            name: {"ranks": 1, "settings": small} for name in ("pretrain", "copies", "chat")
        },
        "settings": small
        | {
            "data": {
                "corpora": {
                    name: {"sample": {"tokens": 600}}
                    for name in ("self_generated_chats", "self_generated")
                }
            }
        },
        "methods": {name: None for name in load_study(quick, texts).methods if name not in kept},
    }
    gate = {"settings": {"gate": {"tokens": 200, "max_open_fraction": 0.5}}}
    changes["methods"]["preserve_self_generated"] = gate
    plain = {
        "extends": str(PROJECT / "studies/configs/chat_plain.yaml"),
        "folder": str(tmp_path / "plain"),
        "base": str(tmp_path / "study" / "pretrain" / "hf"),
        "settings": small,
        "seeds": [1],
    }
    own = ("own_tuned", "own_kl_korean")
    # A base of two steps writes noise, of which too much looks like Korean.
    own_gate = {"settings": {"gate": {**gate["settings"]["gate"], "negatives": ["english"]}}}
    korean = {
        "extends": str(PROJECT / "studies/configs/chat_korean.yaml"),
        "folder": str(tmp_path / "korean"),
        "base": str(tmp_path / "study" / "chat" / "hf"),
        "scratch": None,
        "stages": {"pretrain": None, "copies": None, "chat": None},
        "settings": small
        | {
            "data": {
                "corpora": {
                    name: {"sample": {"tokens": 600}}
                    for name in (
                        "self_generated_chats",
                        "self_generated",
                        "self_generated_korean_chats",
                    )
                }
            }
        },
        "methods": {
            name: own_gate if name in own else None
            for name in load_study(PROJECT / "studies/configs/chat_korean.yaml", texts).methods
        },
        "seeds": [1],
    }
    korean["methods"]["own_tuned"] = {
        "settings": own_gate["settings"]
        | {
            "stages": [
                {"name": "language", "steps": 1, "weights": {"korean_chats": 0}},
                {"name": "chats", "steps": 1, "weights": {"korean": 1, "korean_chats": 3}},
            ],
            "schedule": {"steps": 2},
        }
    }
    for name, values in (("study", changes), ("plain", plain), ("korean", korean)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        done = study_command("run", tmp_path / f"{name}.yaml", "--data", texts)
        assert done.returncode == 0, done.stderr
    arguments = [
        tmp_path / "study",
        "--texts",
        texts,
        "--plain",
        tmp_path / "plain",
        "--max-bytes",
        4000,
    ]
    monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
    score.main()
    table = (tmp_path / "study" / "chats.md").read_text()
    assert table in capsys.readouterr().out
    labels = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert labels == [
        "Base",
        "Full fine-tuning, 1e-3",
        "Preserve 1/2, self-generated text",
        "Preserve 1/2, self-generated text + gate",
        "Chat vector",
    ]
    assert all(line.count("|") == 12 for line in table.splitlines())
    as_the_base = [line.split("|")[-2].strip() != "" for line in table.splitlines()[2:]]
    assert as_the_base == [False, False, False, True, False], "of an export with a gate"
    monkeypatch.setattr(score, "score_chats", None)  # what was scored is not scored again
    score.main()
    assert (tmp_path / "study" / "chats.md").read_text() == table
    monkeypatch.undo()
    monkeypatch.chdir(PROJECT)
    arguments = [tmp_path / "korean", "--texts", texts, "--max-bytes", 4000]
    monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
    score.main()
    table = (tmp_path / "korean" / "chats.md").read_text()
    labels = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert labels == [
        "Base",
        "Adapt 1/8 with own weights, tuned on Korean chats + gate",
        "Adapt 1/8 with own weights, own chats by KL, half with Korean users + gate",
    ], "no export without the gate of open tokens' own weights"
