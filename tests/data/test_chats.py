"""Chats become prompts and answers by a tokenizer's chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.data.chats import ChatTemplate, chat_template
from pipeline.data.preprocess import preprocess
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.unit_work import Job, is_heldout
from pipeline.data.workers import local_workers
from pipeline.errors import DataError
from tests.data.helpers import STORIES260K, stories_tokenizer
from tests.data.test_prompts import stored

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('two users') }}{% endif %}"
    "User: {{ message.content | trim }}\n"
    "{% else %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = [
    turn("user", "Who ran home? "),
    turn("assistant", "Tom."),
    turn("user", "Why?"),
    turn("assistant", "It was late."),
]


@pytest.fixture
def model(tmp_path) -> Path:
    shutil.copytree(STORIES260K, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def make(model: Path, output: Path, chats: list[object], **settings: object):
    path = output.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"id": 1, "messages": chat}) + "\n" for chat in chats))
    job = Job(inputs=(str(path),), tokenizer=str(model), output=output, messages_key="messages", **settings)  # type: ignore[arg-type]
    with local_workers(1) as workers:
        return preprocess(job, workers, max_bad_fraction=0.9)


def test_each_answer_is_learned_once_behind_what_transformers_renders(model, tmp_path):
    make(model, tmp_path / "out", [CHAT])
    library = AutoTokenizer.from_pretrained(model)
    found = stored(tmp_path / "out")
    assert len(found) == 2
    encode = stories_tokenizer().reference.encode
    for (prompt, answer), at in zip(found, (1, 3), strict=True):
        text = library.apply_chat_template(CHAT[:at], tokenize=False, add_generation_prompt=True)
        assert text.startswith("<s>")
        assert prompt == [1, *encode([text.removeprefix("<s>")]).ids.tolist()]  # one BOS, the document's own
        assert answer == [*encode([CHAT[at]["content"]]).ids.tolist(), 2]  # and one end


def test_sharegpt_is_read_as_messages(model, tmp_path):
    names = {"user": ["human", "user"], "assistant": ["gpt", "chatgpt", "assistant"]}
    made = make(model, tmp_path / "out", [CHAT])
    for number in range(3):
        chat = [
            {"from": names[turn["role"]][number % len(names[turn["role"]])], "value": turn["content"]} for turn in CHAT
        ]
        assert make(model, tmp_path / f"out{number}", [chat]).documents == made.documents == 2
        assert stored(tmp_path / f"out{number}") == stored(tmp_path / "out")


def test_bad_chats_are_rejected_with_their_reasons(model, tmp_path):
    bad: list[object] = [
        "text",
        [{"role": "user"}, {"from": ["gpt"], "value": 1}],
        [turn("user", "alone")],
        [turn("user", "a"), turn("user", "b"), turn("assistant", "c")],
        [turn("user", "a"), turn("assistant", "  ")],
    ]
    made = make(model, tmp_path / "out", [CHAT, *bad])
    assert made.documents == 2
    assert made.rejected == {"empty_text": 1, "messages_not_usable": 3, "no_answer": 1}


def test_the_answers_of_a_chat_are_held_out_together(model, tmp_path):
    chats = [[turn("user", f"{number}?"), *CHAT[1:]] for number in range(40)]
    train = make(model, tmp_path / "out", chats, heldout_fraction=0.5)
    heldout = TokenCorpus(tmp_path / "out.heldout").manifest
    alone = sum(is_heldout(json.dumps(chat, separators=(",", ":")), 0.5) for chat in chats)
    assert 0 < heldout.documents == 2 * alone < 80
    assert train.documents + heldout.documents == 80


def test_another_template_is_another_corpus(model, tmp_path):
    make(model, tmp_path / "out", [CHAT])
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("User", "Human"))
    chat_template.cache_clear()
    with pytest.raises(DataError, match="begun with another chat template"):
        make(model, tmp_path / "out", [CHAT])


def test_a_template_runs_in_a_sandbox(model, tmp_path):
    (model / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    )
    with pytest.raises(DataError, match="messages_not_usable"):
        make(model, tmp_path / "out", [CHAT])
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no chat template; take the tokenizer of a chat model"):
        ChatTemplate(STORIES260K)
    (tmp_path / "x.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"x.model: it would read the markers of chats as text"):
        ChatTemplate(tmp_path / "x.model")
