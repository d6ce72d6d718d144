"""Which tokens get rows of their own: exact counts of the corpora of role new."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pipeline.config.run import load_config
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import train_folder
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.methods import own_tokens
from pipeline.methods.own_tokens import own_tokens_of
from pipeline.methods.scale import Scale, upscale
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.training.runs import write_config
from tests.widened import scale_settings

VOCAB_SIZE = 512


def run_with(tmp_path, tokens, own_rows: Any, **changes: Any):
    method = scale_settings("adapt", own_rows=own_rows).model_dump(mode="json")
    return load_config(write_config(tmp_path, tokens, method=method, gate={}, **changes))


def chosen(config, **options):
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    return own_tokens_of(config, VOCAB_SIZE, **{"tokenizer_fingerprint": fingerprint, **options})


@pytest.mark.parametrize("at_once", [7, 2**24])
def test_tokens_are_counted_in_new_text_alone(tokens, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(own_tokens, "_READ_TOKENS", at_once)
    config = run_with(tmp_path, tokens, {"min_count": 5})
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    folder = train_folder(config.data, "korean")
    corpus = TokenCorpus(folder, tokenizer_fingerprint=fingerprint)
    counts = Counter(corpus.read(0, corpus.tokens).tolist())
    expected = sorted(token for token, count in counts.items() if count >= 5)
    assert 0 < len(expected) < VOCAB_SIZE
    assert chosen(config) == tuple(expected)


def test_all_tokens_need_no_corpus(tmp_path):
    config = run_with(tmp_path, tmp_path / "none", "all")
    assert chosen(config) == tuple(range(VOCAB_SIZE))


def test_without_own_rows_none_are_chosen(tmp_path):
    assert chosen(load_config(write_config(tmp_path, tmp_path / "none"))) is None


def test_a_count_that_no_token_reaches_is_refused_with_the_largest(tokens, tmp_path):
    config = run_with(tmp_path, tokens, {"min_count": 10**9})
    with pytest.raises(ConfigError, match=r"min_count: expected at most \d+, how often the most"):
        chosen(config)


def test_a_corpus_of_another_tokenizer_or_none_is_refused(tokens, tmp_path):
    with pytest.raises(DataError, match="tokenizer"):
        chosen(run_with(tmp_path, tokens, {"min_count": 5}), tokenizer_fingerprint="another")
    with pytest.raises(DataError) as error:
        chosen(run_with(tmp_path, tmp_path / "none", {"min_count": 5}))
    assert "\n" not in str(error.value)


def test_low_rank_differences_of_experts_are_refused(base, tmp_path):
    settings = scale_settings("adapt", low_rank=2)
    opened = base("mixtral")
    with pytest.raises(ConfigError, match=r"method\.low_rank: a mixture of experts"):
        upscale(settings, opened, tmp_path, 0)
    method = Scale(settings, tmp_path, 0)
    with pytest.raises(ConfigError, match=r"method\.low_rank: a mixture of experts"):
        method.build(opened.spec, SINGLE, "none")


def test_a_first_layer_beyond_the_last_is_refused(tmp_path):
    settings = scale_settings("preserve", own_gains=True, own_first_layer=99)
    with pytest.raises(ConfigError, match="own_first_layer: 99 leaves none of the base's"):
        upscale(settings, open_base(STORIES), tmp_path, 0)
