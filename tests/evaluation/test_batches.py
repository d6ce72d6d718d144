"""A text is scored and answered beside others as alone, also where a model's rotary frequencies
change with length."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.evaluation import chats
from pipeline.evaluation.batches import frequencies_of, frequency_context
from pipeline.evaluation.benchmarks import _in_parts, benchmark_model
from pipeline.evaluation.chats import read_chats, score_chats
from pipeline.evaluation.perplexity import _token_nll, _Window, score_folder
from pipeline.hf.load import load_hf_model
from tests.bases import CONFIGS
from tests.extensions.self_generated.helpers import copied_stories, random_base
from tests.files import change_json
from tests.texts import chat, write_chats
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

SENTENCE = "Once upon a time there was a little girl who lived in a small house with a big dog and a red ball ."
TEMPLATE = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
CONTEXT = 32
"""Of the base phi3, before its frequencies change."""


def text_of(words: int) -> str:
    return " ".join((SENTENCE.split() * 20)[:words])


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> Path:
    """A random model of Phi-3, with a chat template."""
    folder = random_base("phi3", tmp_path_factory.mktemp("longrope") / "base")
    change_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    # Many ends, so that answers differ in length.
    change_json(folder / "generation_config.json", eos_token_id=[*range(2, 600, 15)])
    return folder


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


def test_log_likelihoods_and_answers_of_lm_eval(longrope):
    tokenizer = load_tokenizer(longrope)
    short = tokenizer.reference.encode([text_of(8)]).ids.tolist()
    long = tokenizer.reference.encode([text_of(60)]).ids.tolist()
    assert len(short) < CONTEXT < len(long)
    model = benchmark_model(longrope, batch_size=4)
    pairs = [(short[:3], short[3:]), (long[:4], long[4:]), (short[1:5], short[5:])]
    requests = [(("", ""), *pair) for pair in pairs]
    apart = []
    for request in requests:
        [(score, _)] = model._loglikelihood_tokens([request], disable_tqdm=True)
        apart.append(score)
    together = [score for score, _ in model._loglikelihood_tokens(requests, disable_tqdm=True)]
    # Sums of fp32 over few tokens: padding may change their order, by a few of 6e-8.
    assert together == pytest.approx(apart, rel=1e-6)

    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [Instance("generate_until", {}, (text_of(words), settings), 0) for words in (8, 40, 22)]
    answers = [model.generate_until([one], disable_tqdm=True)[0] for one in asked]
    assert model.generate_until(asked, disable_tqdm=True) == answers


def test_a_continuation_that_is_too_long_is_cut_into_parts():
    context, ids = [1, 2], list(range(10, 35))
    assert _in_parts((None, context, ids), 25) == [(None, context, ids)]
    parts = _in_parts((None, context, ids), 8)
    assert len(parts) > 2
    read = context
    for _, before, scored in parts:
        assert before and before == read[-len(before) :] and 0 < len(scored) <= 8
        assert len(before) + len(scored) <= 9, "the last token is only predicted"
        assert before == read or len(before) >= 4
        read = [*read, *scored]
    assert read == [*context, *ids]


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
