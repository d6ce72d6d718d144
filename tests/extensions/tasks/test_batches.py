"""A question is answered beside others as alone, also where a model's rotary frequencies change with
length."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.extensions.tasks.benchmarks import _in_parts, benchmark_model
from tests.evaluation.longrope import CONTEXT, text_of, write_longrope


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> Path:
    return write_longrope(tmp_path_factory.mktemp("longrope") / "base")


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
