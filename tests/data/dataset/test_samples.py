"""Samples for training and validation, read from corpora on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.data import Data
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import TrainingSamples, load_heldout
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.errors import DataError
from tests.data.helpers import STORIES260K, documents, stories_tokenizer, tokenize, write_jsonl

LENGTH = 48


def described(folder: Path, **changes: object) -> Data:
    corpora = {
        "korean": {"input": [str(folder / "korean.jsonl")], "heldout_fraction": 0.2},
        "english": {
            "input": [str(folder / "english.jsonl")],
            "heldout_input": [str(folder / "english.heldout.jsonl")],
            "role": "replay",
        },
    }
    settings = {
        "folder": folder / "tokens",
        "sequence_length": LENGTH,
        "corpora": corpora,
        "replay_fraction": 0.25,
    }
    return Data.model_validate({**settings, **changes})


@pytest.fixture(scope="module")
def data(module_folder: Path) -> Data:
    folder = module_folder
    for seed, name in enumerate(("korean", "english", "english.heldout")):
        write_jsonl(folder / f"{name}.jsonl", documents(150, seed))
    made = described(folder)
    with local_workers(1) as workers:
        for job in corpus_jobs(made, STORIES260K):
            preprocess(replace(job, unit_bytes=2000), workers)
    return made


def training(data: Data, seed: int = 1) -> TrainingSamples:
    return TrainingSamples(data, seed=seed, tokenizer_fingerprint=stories_tokenizer().fingerprint)


def test_a_sample_is_a_pure_function_of_its_index(data: Data):
    ours, again = training(data), training(data)
    forward = [ours[index] for index in range(60)]
    for index in reversed(range(60)):
        assert all(np.array_equal(a, b) for a, b in zip(forward[index], again[index], strict=True))
    other = training(data, seed=2)
    assert any(
        not np.array_equal(forward[index].tokens, other[index].tokens) for index in range(60)
    )
    assert ours[10**9].tokens.shape == (LENGTH,), "without a table of anything"


def test_a_temperature_draws_corpora_of_a_role_by_their_sizes(module_folder: Path, data: Data):
    described_corpora = {name: {"input": ["x"]} for name in ("korean", "english")}
    described_corpora["english"]["weight"] = 3
    tokens = {name: TokenCorpus(data.folder / name).tokens for name in described_corpora}
    for temperature, power in ((1, 1.0), (2, 0.5), (None, 0.0)):
        changed = described(
            module_folder, corpora=described_corpora, replay_fraction=0, temperature=temperature
        )
        drawn = training(changed).epochs_after(2**16)
        sampled = {name: drawn[name] * -(-tokens[name] // LENGTH) for name in tokens}
        expected = 3 * (tokens["english"] / tokens["korean"]) ** power
        assert sampled["english"] / sampled["korean"] == pytest.approx(expected, rel=1e-3)
    assert tokens["english"] / tokens["korean"] > 1.1, "or this tries nothing"


def test_held_out_parts(data: Data):
    parts = load_heldout(data, tokenizer_fingerprint=None)
    assert list(parts) == ["korean", "english"]
    for name, part in parts.items():
        corpus = TokenCorpus(data.folder / f"{name}.heldout")
        assert (part.tokens, part.bytes) == (corpus.tokens, corpus.manifest.bytes)
        samples = list(part)
        assert len(samples) == len(part) == -(-corpus.tokens // LENGTH)
        read = np.concatenate([sample.tokens[sample.targets != IGNORED] for sample in samples])
        stored = corpus.read(0, corpus.tokens)
        assert Counter(read.tolist()) == Counter(stored[stored != 2].tolist())
        assert np.array_equal(part[1].tokens, samples[1].tokens)
    assert parts["english"].bytes == sum(len(text.encode()) for text in documents(150, 2))


def test_budgets(module_folder: Path, data: Data):
    def total(**limits: object) -> int | None:
        corpora = {name: corpus.model_dump() for name, corpus in data.corpora.items()}
        corpora["korean"].update(limits)
        return training(described(module_folder, corpora=corpora, replay_fraction=0.0)).total

    samples = -(-TokenCorpus(data.folder / "korean").tokens // LENGTH)
    found = [total(), total(epochs=1), total(epochs=2.5), total(token_budget=10 * LENGTH + 1)]
    assert found == [None, samples, int(2.5 * samples), 11]


def test_a_corpus_that_is_not_usable_is_refused(data: Data, tmp_path: Path):
    for load in (
        lambda **own: TrainingSamples(data, seed=1, **own),
        lambda **own: load_heldout(data, **own),
    ):
        with pytest.raises(
            DataError, match=r"was tokenized with another tokenizer: expected .*, found"
        ):
            load(tokenizer_fingerprint="tokenizers:0123")
    elsewhere = data.model_copy(update={"folder": tmp_path})
    with pytest.raises(DataError, match="does not exist"):
        training(elsewhere)
    (tmp_path / "korean" / ".units").mkdir(parents=True)
    whole = (data.folder / "korean" / "manifest.json").read_text()
    manifests = {
        None: r"is unfinished: start scale-cpt tokenize .* again",
        '{"documents": "many"}': r"manifest\.json: documents: .* valid integer, .*; copy the corpus again, or remove",
        whole.replace("00000-000000", "../../etc/passwd"): "outside the folder",
    }
    for content, message in manifests.items():
        if content is not None:
            (tmp_path / "korean" / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=message):
            training(elsewhere)


def test_many_shards_do_not_stay_open(tmp_path: Path):
    tokenize(tmp_path / "a", write_jsonl(tmp_path / "a.jsonl", documents(200)), unit_bytes=100)
    corpus = TokenCorpus(tmp_path / "a")
    assert len(corpus.manifest.shards) > 100
    everything = corpus.read(0, corpus.tokens)
    assert len(everything) == corpus.tokens
    assert corpus._shard.cache_info().currsize == 64
    assert np.array_equal(corpus.read(50, 900), everything[50:900])
    assert len(corpus.document_starts(0, corpus.tokens)) == 200
