"""Runs whose data-parallel ranks share the experts of a mixture: they train as ranks that hold all
of them, and resume at another layout."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import RESUME_LATER
from pipeline.extensions.tasks.observer import TaskScores
from pipeline.extensions.tasks.training_tasks import WrittenQuestion
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.extensions.self_generated.helpers import random_base
from tests.training.journeys import METHODS
from tests.training.runs import (
    in_turn,
    losses,
    make_run,
    metrics,
    prepared,
    train,
    write_config,
)

pytestmark = pytest.mark.full

STEPS = 3
SHARED = {"parallel__expert_size": 2}
PADDED = {**SHARED, "parallel__padded_experts": True}
RUNS: dict[str, dict[str, Any]] = {
    "preserve": {"zero": 2, **SHARED},
    "adapt": {"zero": 1, **PADDED, "activation_checkpointing": "all", "data__replay_loss": "kl"},
    "route": {"zero": 1, **PADDED, "activation_checkpointing": "all"},
    "lora": {"zero": 2, **PADDED, "base_precision": "nf4"},
    "adapt ZeRO-3": {"zero": 3, **SHARED},
    "preserve ZeRO-3": {"zero": 3, **PADDED, "activation_checkpointing": "all"},
}
ALONE = {"parallel__expert_size": 1, "parallel__padded_experts": False}
CLOSE = 1e-4


def settings_of(name: str) -> dict[str, Any]:
    method = METHODS[name.split()[0]]
    both = {"l_fp": 1, "collaborative_modules": "both"} if "l_fp" in method else {}
    return {"method": method | both, **RUNS[name]}


def held_experts(config: Any) -> tuple[int, float]:
    """How many experts this rank holds, and the result of its preservation check."""
    trainer = prepared(config)
    experts = trainer.engine.model.mixtures[0].experts
    return len(experts.gate.weight), trainer.step0_difference


def written_answers(config: Path) -> list[str]:
    """What the model of a run about to start writes after three prompts of different lengths."""
    scores = TaskScores(prepared(config))
    tokenizer = load_tokenizer(STORIES)
    texts = ["Once upon a time there was a little girl", "The", "One day, a dog"]
    questions = [WrittenQuestion(ids_of(tokenizer, text), 6, ["."]) for text in texts]
    return scores._write(questions)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The folder of a base with experts."""
    return str(random_base("qwen3_moe dense layer", tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def runs(tokens, mixture, tmp_path_factory):
    """The folder of all runs, by kind: with experts over ranks, without, and resumed elsewhere."""
    folder = tmp_path_factory.mktemp("shared")

    def jobs(kind, make, job, changes):
        for name in RUNS:
            settings = {"base": mixture, "schedule__steps": STEPS, **settings_of(name), **changes}
            yield partial(job, make(folder / kind / name, tokens, **settings))

    done = [[0] * len(RUNS)]
    assert run_ranks(in_turn, 2, list(jobs("shared", make_run, train, {}))) == done * 2
    assert run_ranks(in_turn, 2, list(jobs("alone", make_run, train, ALONE))) == done * 2
    stopped = run_ranks(in_turn, 2, list(jobs("stopped", make_run, partial(train, stop=True), {})))
    assert stopped == [[RESUME_LATER] * len(RUNS)] * 2
    for kind, ranks, changes in (("resumed", 2, {}), ("moved", 1, ALONE)):
        shutil.copytree(folder / "stopped", folder / kind)
        continued = list(jobs(kind, write_config, train, changes))
        assert run_ranks(in_turn, ranks, continued) == done * ranks
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_as_with_all_experts_on_every_rank(runs, name):
    shared = losses(runs / "shared" / name)
    assert len(shared) == STEPS and shared[-1] < shared[0]
    for kind in ("alone", "moved"):
        assert losses(runs / kind / name) == pytest.approx(shared, rel=CLOSE)
    assert metrics(runs / "resumed" / name) == metrics(runs / "shared" / name)


def test_each_rank_holds_its_experts_and_keeps_the_base(tokens, mixture, tmp_path):
    settings = {"base": mixture, **settings_of("adapt")}
    config = make_run(tmp_path, tokens, **settings)
    assert run_ranks(held_experts, 2, config) == [(3, 0.0)] * 2


def test_ranks_that_share_experts_write_the_answers_of_one_rank(tokens, mixture, tmp_path):
    """Also where the prompts of a micro-batch are few, and of other lengths than on other ranks."""
    jobs = []
    for kind, changes in (("shared", {}), ("alone", ALONE)):
        settings = {
            "base": mixture,
            "schedule__micro_batch_size": 2,
            **settings_of("adapt"),
        } | changes
        jobs.append(partial(written_answers, make_run(tmp_path / kind, tokens, **settings)))
    shared, alone = run_ranks(in_turn, 2, jobs)[0]
    assert shared == alone and len(set(shared)) == 3


def test_experts_that_train_are_refused(tokens, mixture, tmp_path):
    jobs = []
    for name in ("fft", "freeze", "llama_pro"):
        method = METHODS[name] | ({"added_layers": 1} if name == "llama_pro" else {})
        method |= {"frozen_layers": 1} if name == "freeze" else {}
        config = make_run(tmp_path / name, tokens, base=mixture, method=method, zero=1, **SHARED)
        jobs.append(partial(train, config))
    for fault in run_ranks(in_turn, 2, jobs)[0]:
        assert "parallel.expert_size: expected 1 with method.name" in fault
