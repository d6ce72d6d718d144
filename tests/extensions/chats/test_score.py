"""Chats with references, answered by a real small model: compared with transformers' own greedy
decoding."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.errors import ConfigError, DataError
from pipeline.extensions.chats import score
from pipeline.extensions.chats.score import ChatScore, read_chats, score_chats
from tests.bases import STORIES
from tests.extensions.self_generated.helpers import copied_stories
from tests.programs import scale_cpt
from tests.texts import chat, write_chats

pytestmark = pytest.mark.full

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)
ENDS = (2, 426)
"""The end of a document, and the full stop."""
LIMIT = 12
ASKED = [
    [("user", "Once upon a time, Tom")],
    [("system", "One day, Lily saw a big dog."), ("user", "The dog was")],
    [("user", "Mia"), ("assistant", "was sad."), ("user", "She")],
    [("user", "He ran and ran and")],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """stories260K with a chat template; of its generation_config.json only the ends must count."""
    settings = {
        "eos_token_id": list(ENDS),
        "repetition_penalty": 5.0,
        "max_new_tokens": 2,
        "do_sample": True,
    }
    return copied_stories(
        tmp_path_factory.mktemp("model") / "chat",
        tokenizer_config={"chat_template": TEMPLATE},
        generation_config=settings,
    )


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What transformers writes to each chat alone, without the end; as long as the limit where
    there is none."""
    library = AutoModelForCausalLM.from_pretrained(STORIES)
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    library.generation_config = GenerationConfig()
    found = []
    for asked in ASKED:
        text = "<s>"
        for role, content in asked:
            text += content
            if role == "assistant":
                text += "</s>"
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        new = library.generate(
            ids, do_sample=False, max_new_tokens=LIMIT, eos_token_id=list(ENDS), pad_token_id=2
        )
        written = new[0, ids.shape[1] :].tolist()
        if written[-1] in ENDS:
            written = written[:-1]
        found.append(written)
    return found


@pytest.mark.parametrize("batch_tokens", [1, 2**13])
def test_a_score_is_of_transformers_greedy_answers(
    batch_tokens, model, answers, tmp_path, monkeypatch
):
    monkeypatch.setattr(score, "_BATCH_TOKENS", batch_tokens)
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    texts = [tokenizer.decode(answer) for answer in answers]
    right = [
        chat(*asked, ("assistant", f" {text}\n")) for asked, text in zip(ASKED, texts, strict=True)
    ]
    wrong = [
        chat(*asked, ("assistant", f"{text}!")) for asked, text in zip(ASKED, texts, strict=True)
    ]
    names = [
        write_chats(tmp_path / "right.jsonl", *right),
        write_chats(tmp_path / "half.x.jsonl", *right, *wrong),
    ]
    ended = sum(len(answer) < LIMIT for answer in answers) / len(answers)
    assert 0 < ended < 1, "some answers end, and some do not"
    length = pytest.approx(sum(map(len, answers)) / len(answers))
    assert score_chats(model, read_chats(names), max_answer_tokens=LIMIT) == {
        "right": ChatScore(4, ended, ended, length),
        "half": ChatScore(8, ended / 2, ended, length),
    }


def test_thoughts_are_no_part_of_an_answer(answers, tmp_path):
    """The model writes what it always does; its tokenizer shows the first word as the end of
    thoughts."""
    asked, text = next(
        (asked, AutoTokenizer.from_pretrained(STORIES).decode(answer))
        for asked, answer in zip(ASKED, answers, strict=True)
        if 2 < len(answer) < LIMIT
    )
    word, said = text.split(maxsplit=1)
    decoder = json.loads((STORIES / "tokenizer.json").read_text())["decoder"]
    decoder["decoders"].append(
        {"type": "Replace", "pattern": {"String": word}, "content": "</think>"}
    )
    thinking = copied_stories(
        tmp_path / "thinking",
        tokenizer={"decoder": decoder},
        tokenizer_config={"chat_template": TEMPLATE},
        generation_config={"eos_token_id": list(ENDS)},
    )
    references = [said, f"<think>\nOther thoughts.\n</think>\n\n{said}", text, f"{said}</think>"]
    path = write_chats(
        tmp_path / "x.jsonl", *(chat(*asked, ("assistant", one)) for one in references)
    )
    score = score_chats(thinking, read_chats([path]), max_answer_tokens=LIMIT)["x"]
    assert (score.exact_match, score.ended) == (0.5, 1)
    assert score.answer_tokens > 2, "thoughts are part of the length"


def test_an_answer_as_trained_is_right_where_a_turn_ends_otherwise_than_a_document(
    answers, tmp_path
):
    """As a base of Qwen2.5 is trained: the turn ends with <|im_end|>, the document with another
    token. Here the model's full stop ends turns."""
    turn_end = AutoTokenizer.from_pretrained(STORIES).decode([426])
    library = AutoModelForCausalLM.from_pretrained(STORIES)
    library.generation_config = GenerationConfig()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    asked = ASKED[0]
    ids = tokenizer("<s>" + asked[0][1], return_tensors="pt", add_special_tokens=False).input_ids
    new = library.generate(ids, do_sample=False, max_new_tokens=60, eos_token_id=2)
    written = new[0, ids.shape[1] :].tolist()
    # The token after the first full stop stands for the end of a document.
    stop = written.index(426)
    end = next(id_ for id_ in written[stop + 1 :] if id_ not in written[: stop + 1])
    place = written.index(end)
    answer = tokenizer.decode(written[:place])
    assert turn_end in answer
    said, *_, last = answer.rpartition(turn_end)
    template = TEMPLATE.replace("</s>", turn_end + last)
    folder = copied_stories(
        tmp_path / "turns",
        tokenizer_config={"chat_template": template},
        generation_config={"eos_token_id": [end]},
    )
    path = write_chats(
        tmp_path / "x.jsonl", chat(*asked, ("assistant", said)), chat(*asked, ("assistant", "no"))
    )
    score = score_chats(folder, read_chats([path]), max_answer_tokens=60)["x"]
    assert (score.exact_match, score.ended) == (0.5, 1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        *(
            (line, "line 2: expected an object with `messages`")
            for line in (
                '{"messages": ',
                '["messages"]',
                '{"messages": [{"role": "user", "content": 1}]}',
                chat(("user", "a")),
                chat(("assistant", "a")),
                chat(("user", "a"), ("assistant", " ")),
            )
        ),
        (
            chat(("tool", "a"), ("assistant", "b")),
            "line 2: .*chat: its chat template cannot frame a message.*no tools",
        ),
        (
            chat(("user", "a " * 600), ("assistant", "b")),
            "line 2: its [0-9]+ tokens leave no space to answer in a cont",
        ),
    ],
)
def test_bad_chats_are_named_with_their_line(lines, said, model, tmp_path):
    path = Path(write_chats(tmp_path / "x.jsonl", chat(*ASKED[0], ("assistant", "b"))))
    second = lines if isinstance(lines, str) else json.dumps({"messages": lines})
    path.write_text(f"{path.read_text()}{second}\n")
    with pytest.raises(DataError, match=f"{path}, {said}") as caught:
        score_chats(model, read_chats([str(path)]))
    assert "\n" not in str(caught.value)


def test_other_faults_of_files_and_models(tmp_path):
    path = write_chats(tmp_path / "x.jsonl", chat(*ASKED[0], ("assistant", "b")))
    with pytest.raises(DataError, match="its tokenizer has no chat template"):
        score_chats(STORIES, read_chats([path]))
    with pytest.raises(ConfigError, match="two files would be called x; rename one"):
        read_chats([path, path])


def test_the_command_line_compares_models(model, tmp_path):
    path = write_chats(tmp_path / "x.jsonl", chat(*ASKED[0], ("assistant", "b")))
    options = [
        "--model",
        model,
        os.path.relpath(model),
        "--chats",
        path,
        "--max-answer-tokens",
        "3",
    ]
    done = scale_cpt("evaluate", *options)
    assert done.returncode == 0, done.stderr
    header, _, first, second = done.stdout.splitlines()
    assert header.split() == ["chats", "exact", "match", "answers", "that", "end", "tokens"]
    assert (
        first.split() == [f"{model}:", *(row := ["x", "1", "0.0%", "0.0%", "3.0"])]
        and second.split()[1:] == row
    )
