"""A chat is answered beside others as alone, also where a model's rotary frequencies change with
length."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.extensions.chats import score
from pipeline.extensions.chats.score import read_chats, score_chats
from tests.evaluation.longrope import CONTEXT, TEMPLATE, text_of, write_longrope
from tests.extensions.self_generated.helpers import copied_stories
from tests.texts import chat, write_chats


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> Path:
    return write_longrope(tmp_path_factory.mktemp("longrope") / "base")


@pytest.mark.parametrize("kind", ["stories", "longrope"])
def test_an_answer_is_not_that_of_the_batch(kind, longrope, tmp_path, monkeypatch):
    """A chat that nearly fills the context leaves the others their own room; longrope's frequencies
    are each one's."""
    folder = longrope
    if kind == "stories":
        settings = {
            "tokenizer_config": {"chat_template": TEMPLATE},
            "config": {"max_position_embeddings": 60},
        }
        folder = copied_stories(tmp_path / "stories", **settings)
    tokenizer = load_tokenizer(folder)
    words_of_chats = (33, 5, 7, 3) if kind == "stories" else (45, 5, 22, 21, 23)
    lengths = []
    names = []
    for number, words in enumerate(words_of_chats):
        text = text_of(words)
        lengths.append(len(tokenizer.reference.encode([text]).ids))
        asked = chat(("user", text), ("assistant", "x"))
        names.append(write_chats(tmp_path / f"{number}.jsonl", asked))
    if kind == "stories":
        assert 35 < max(lengths) < 60, "the longest nearly fills the context"
    else:
        assert min(lengths) < CONTEXT < max(lengths), "both kinds of frequencies are used"
    read = read_chats(names)
    together = score_chats(folder, read, max_answer_tokens=30)
    monkeypatch.setattr(score, "_BATCH_TOKENS", 1)
    assert together == score_chats(folder, read, max_answer_tokens=30)
    assert together["1"].answer_tokens == 30 or together["1"].ended
