"""Samples for training and validation, read from corpora on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.config.data import Data
from pipeline.config.run import parse_config
from pipeline.config.stage_plan import TrainingStage, training_stages
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import (
    StageSamples,
    TrainingSamples,
    load_heldout,
    samples_of_stages,
)
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.errors import DataError
from tests.data.helpers import STORIES260K, documents, stories_tokenizer, tokenize, write_jsonl

LENGTH = 48
EXAMPLE = Path(__file__).parents[3] / "configs" / "demo.yaml"


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


def stages_of(data: Data, *stages: dict[str, object]) -> list[TrainingStage]:
    """Stages of 4 sequences a step, on `data`."""
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    steps = sum(int(str(stage["steps"])) for stage in stages)
    values["schedule"] |= {"steps": steps, "global_batch_size": 4, "micro_batch_size": 2}
    named = [{"name": f"stage{number}", **stage} for number, stage in enumerate(stages)]
    changed = {
        "method": {"name": "fft"},
        "gate": None,
        "data": data.model_dump(mode="json"),
        "stages": named,
    }
    config = parse_config(values | changed, source="a test")
    return training_stages(config)


def drawn_in(
    stages: list[TrainingStage], plan: tuple[StageSamples, ...]
) -> list[list[tuple[str, int]]]:
    """The corpus and the number of each sample, by stage."""
    drawn: list[list[tuple[str, int]]] = []
    for stage, (samples, first) in zip(stages, plan, strict=True):
        indices = range(first, first + stage.steps * 4)
        drawn.append([tuple(samples._order[index]) for index in indices])
    return drawn


def test_a_stage_goes_on_in_each_corpus_where_the_one_before_it_ended(data: Data):
    everything = len(training(data).corpora["korean"])
    stages = stages_of(
        data,
        {"steps": 5},
        {"steps": 5, "replay_fraction": 0.5},
        {"steps": 5, "replay_fraction": 0.1, "passage_steps": 3},
        {"steps": 5, "weights": {"english": 0}, "replay_fraction": 0.0},
        {"steps": 5, "replay_fraction": 0.5},
    )
    plan = samples_of_stages(stages, seed=1, tokenizer_fingerprint=None)
    drawn = list(chain.from_iterable(drawn_in(stages, plan)))
    korean = [number for corpus, number in drawn if corpus == "korean"]
    assert len(korean) > 40
    for start in range(0, len(korean), everything):
        epoch = korean[start : start + everything]
        assert len(set(epoch)) == len(epoch), "a text is read again only in the next epoch"
    shares = [sum(corpus == "english" for corpus, _ in part) for part in drawn_in(stages, plan)]
    assert shares == pytest.approx([5, 10, 4, 0, 10], abs=1.5)
    assert shares[3] == 0
    # The same whatever stages follow, and wherever they are asked from.
    again = samples_of_stages(stages[:2], seed=1, tokenizer_fingerprint=None)
    assert drawn_in(stages[:2], again) == drawn_in(stages, plan)[:2]


def test_stages_with_equal_data_read_the_order_of_one(data: Data):
    one = stages_of(data, {"steps": 9})
    two = stages_of(data, {"steps": 4}, {"steps": 5, "learning_rate": 1.0})
    found = drawn_in(two, samples_of_stages(two, seed=1, tokenizer_fingerprint=None))
    [expected] = drawn_in(one, samples_of_stages(one, seed=1, tokenizer_fingerprint=None))
    assert list(chain.from_iterable(found)) == expected


def test_epochs_count_over_all_stages(data: Data):
    korean = data.corpora["korean"].model_copy(update={"epochs": 1.0})
    once = data.model_copy(update={"corpora": {"korean": korean}, "replay_fraction": 0.0})
    samples = len(training(once).corpora["korean"])
    steps = samples // 4
    fits = stages_of(once, {"steps": 3}, {"steps": steps - 3, "sequence_length": LENGTH // 2})
    plan = samples_of_stages(fits, seed=1, tokenizer_fingerprint=None)
    half = len(plan[1].samples.corpora["korean"])
    assert plan[1].samples.total == half - -(-3 * 4 * half // samples)
    too_many = stages_of(once, {"steps": 3}, {"steps": steps, "weights": {"korean": 2}})
    with pytest.raises(DataError, match=r"stages.stage1.steps: \d+ steps need \d+ sequences"):
        samples_of_stages(too_many, seed=1, tokenizer_fingerprint=None)
