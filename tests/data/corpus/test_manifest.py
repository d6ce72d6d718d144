"""Manifests of corpora, of this version and of earlier ones."""

from __future__ import annotations

from pipeline.data.corpus.manifest import SamplingRecord


def test_a_corpus_that_an_earlier_version_sampled_is_read():
    recorded = {
        "base": {},
        "tokens": 1,
        "temperature": 1.0,
        "max_tokens": 8,
        "opening_tokens": 4,
        "chat_template": False,
        "seed": 0,
        "batch_size": 2,
    }
    assert SamplingRecord.model_validate(recorded).prompt_tokens == 4
