"""A text is scored and answered beside others as alone, also where a model's rotary frequencies
change with length."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.evaluation import chats
from pipeline.evaluation.batches import frequencies_of, frequency_context
from pipeline.evaluation.chats import read_chats, score_chats
from pipeline.evaluation.perplexity import _token_nll, _Window, score_folder
from pipeline.hf.load import load_hf_model
from tests.bases import CONFIGS
from tests.evaluation.longrope import CONTEXT, TEMPLATE, text_of, write_longrope
from tests.extensions.self_generated.helpers import copied_stories
from tests.texts import chat, write_chats
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> Path:
    return write_longrope(tmp_path_factory.mktemp("longrope") / "base")


def test_where_frequencies_change():
    assert frequency_context(CONFIGS["phi3"]) == CONTEXT
    assert frequency_context(CONFIGS["llama yarn"]) is None is frequency_context(CONFIGS["olmo3"])
    assert frequencies_of(5, 10, None) == frequencies_of(900, 10, None)
    assert (
        frequencies_of(20, 12, CONTEXT)
        == frequencies_of(3, 29, CONTEXT)
        != frequencies_of(21, 12, CONTEXT)
    )
    assert (
        frequencies_of(33, 12, CONTEXT)
        == frequencies_of(90, 0, CONTEXT)
        != frequencies_of(32, 1, CONTEXT)
    )
    assert frequencies_of(31, 9, CONTEXT) != frequencies_of(30, 9, CONTEXT)


def test_perplexity_of_a_short_text_beside_a_long_one(longrope):
    short, long = [text_of(8)], [text_of(60)]
    both = score_folder(longrope, {"a": [*short, *long]})["a"]
    apart = [score_folder(longrope, {"a": text})["a"] for text in (short, long)]
    total = sum(score.nll_per_token * score.tokens for score in apart)
    assert both.nll_per_token * both.tokens == pytest.approx(total, rel=1e-6)


def test_windows_of_a_model_in_the_scale_format(exports):
    model = load_hf_model(exports("phi3", "adapt")[0])
    assert frequency_context(model.config) == CONTEXT
    windows = []
    for length in (9, 60, 33, 32):
        windows.append(_Window(some_tokens(model.config, 1, length)[0], length - 1))
    alone = [_token_nll(model, [window], "alone")[0] for window in windows]
    for found, expected in zip(_token_nll(model, windows, "together"), alone, strict=True):
        assert_near(found, expected, PARITY)


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
    monkeypatch.setattr(chats, "_BATCH_TOKENS", 1)
    assert together == score_chats(folder, read, max_answer_tokens=30)
    assert together["1"].answer_tokens == 30 or together["1"].ended
