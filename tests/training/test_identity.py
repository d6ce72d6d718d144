"""A run resumes with what it began with: the same tokens, the same base; and never begins again
unnoticed.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.run import load_config
from pipeline.files.json_files import write_json
from tests.bases import STORIES
from tests.data.helpers import documents, write_jsonl
from tests.distributed import run_ranks
from tests.files import change_json
from tests.training.runs import in_turn, make_run, metrics, tokenize_corpora, train, write_config

CHECKPOINT = "step_00000001"
CHANGED_BASES: dict[str, dict[str, Any]] = {
    "eps": {"rms_norm_eps": 0.5},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}


def write_texts(folder: Path, name: str = "1", seed: int = 0) -> str:
    """A file of documents in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return str(write_jsonl(folder / f"{name}.jsonl", documents(60, seed)))


def corpora_of(texts: Path) -> dict[str, Any]:
    """Two small corpora: one of a pattern, one with a held-out part."""
    write_texts(texts / "korean", seed=1)
    english, heldout = (
        write_texts(texts / "english", seed=2),
        write_texts(texts / "heldout", seed=3),
    )
    return {
        "korean": {"input": [str(texts / "korean" / "*")]},
        "english": {"input": [english], "heldout_input": [heldout]},
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A folder of a base, of texts, of their tokens and of a run, which is trained for one step of
    two.
    """
    folder: Path = tmp_path_factory.mktemp("begun")
    shutil.copytree(STORIES, folder / "base")
    settings = {
        "base": str(folder / "base"),
        "data__corpora": corpora_of(folder / "texts"),
        "zero": 1,
    }
    config = make_run(
        folder / "run",
        folder / "tokens",
        **settings,
        data__replay_fraction=0.0,
        schedule__steps=1,
        name="first.yaml",
    )
    tokenize_corpora(load_config(config))
    assert run_ranks(train, 1, config) == [0]
    (folder / "run" / "training.json").unlink()
    return folder


def copied(begun: Path, to: Path) -> Path:
    """The same in a folder of its own, to be trained for two steps; returns the configuration."""
    shutil.copytree(begun, to)
    settings = {"base": str(to / "base"), "data__corpora": corpora_of(to / "texts"), "zero": 1}
    return write_config(
        to / "run", to / "tokens", **settings, data__replay_fraction=0.0, schedule__steps=2
    )


def make_tokens_again(to: Path, config: Path) -> None:
    shutil.rmtree(to / "tokens")
    tokenize_corpora(load_config(config))


def resumed(config: Path) -> tuple[object, list[str]]:
    """The result of training, and what the checkpoints' code says."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pipeline.training.checkpointing")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    [result] = in_turn([partial(train, config)])
    logger.removeHandler(handler)
    return result, said


def test_other_tokens_or_another_architecture_are_refused_at_resume(begun, tmp_path):
    configs = {
        name: copied(begun, tmp_path / name)
        for name in ("another file", "other texts", "held out", "tokens")
    }
    write_texts(tmp_path / "another file" / "texts" / "korean", "2", seed=4)
    write_texts(tmp_path / "other texts" / "texts" / "english", seed=5)
    write_texts(tmp_path / "held out" / "texts" / "heldout", seed=6)
    for name, config in configs.items():
        make_tokens_again(tmp_path / name, config)
    for name, entries in CHANGED_BASES.items():
        configs[name] = copied(begun, tmp_path / name)
        change_json(tmp_path / name / "base" / "config.json", **entries)
    [results] = run_ranks(in_turn, 1, [partial(train, config) for config in configs.values()])
    found = dict(zip(configs, results, strict=True))
    assert found.pop("tokens") == 0, "of the same texts, elsewhere"
    for name, part in {
        "another file": "korean",
        "other texts": "english",
        "held out": "english.heldout",
    }.items():
        refusal = str(found.pop(name))
        assert refusal.startswith(
            f"CheckpointError: {tmp_path / name}/run/checkpoints/{CHECKPOINT}: "
        )
        assert f"when the corpus {part} held other tokens than it holds now" in refusal
    for name, refusal in found.items():
        assert str(refusal).startswith(
            f"CheckpointError: {tmp_path / name}/run/checkpoints/{CHECKPOINT}: "
        )
        assert f"the config.json of its base {begun}/base had another " in str(refusal)
    assert "norm_eps (expected 1e-05, found 0.5)" in str(found["eps"])


def test_a_checkpoint_of_an_earlier_version_resumes_and_says_what_was_not_compared(begun, tmp_path):
    config = copied(begun, tmp_path / "old")
    manifest = tmp_path / "old" / "run" / "checkpoints" / CHECKPOINT / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["run"]["corpora"], values["run"]["base"]["architecture"], values["checksum"]
    write_json(manifest, values)
    expansion = tmp_path / "old" / "run" / "initial_expansion" / "manifest.json"
    values = json.loads(expansion.read_text())
    del values["base_architecture"], values["checksum"]
    write_json(expansion, values)
    [(result, said)] = run_ranks(resumed, 1, config)
    assert result == 0
    expected = (
        "without a record of the config.json of its base and the tokens of its corpora: not "
        "compared"
    )
    assert [line for line in said if expected in line]


def test_a_run_whose_checkpoints_are_gone_is_refused(begun, tmp_path):
    """Whether it was trained to its end or not; what it wrote is left as it is."""
    configs = {name: copied(begun, tmp_path / name) for name in ("unfinished", "finished")}
    write_json(tmp_path / "finished" / "run" / "training.json", {"steps": 1})
    before = {name: (tmp_path / name / "run" / "metrics.jsonl").read_bytes() for name in configs}
    for name in configs:
        shutil.rmtree(tmp_path / name / "run" / "checkpoints")
    [results] = run_ranks(in_turn, 1, [partial(train, config) for config in configs.values()])
    for name, refusal in zip(configs, results, strict=True):
        assert refusal.startswith(
            f"CheckpointError: {tmp_path / name}/run/checkpoints: holds no checkpoint, but "
        )
        assert (tmp_path / name / "run" / "metrics.jsonl").read_bytes() == before[name]
    assert "attempts.jsonl says that the run was saved at step 1" in results[0]
    assert "training.json says that the run is trained" in results[1]
    assert (tmp_path / "finished" / "run" / "training.json").exists()

    for name in ("training.json", "metrics.jsonl"):  # as the message says
        (tmp_path / "finished" / "run" / name).rename(tmp_path / name)
    assert run_ranks(train, 1, configs["finished"]) == [0]
    assert metrics(tmp_path / "finished" / "run")[-1]["step"] == 2
