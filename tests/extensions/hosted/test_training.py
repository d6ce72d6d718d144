"""Runs on hosted bases by the real trainer, on two ranks under ZeRO-1, 2 and 3 and on one."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch

from pipeline.errors import RESUME_LATER
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import by_transformers, opened, save_hosted
from tests.training.runs import (
    in_turn,
    losses,
    make_run,
    metrics,
    train,
    train_and_look,
    write_config,
)

STEPS = 3
PRESERVE = {"variant": "preserve", "l_fp": None}
RUNS: dict[str, dict[str, Any]] = {
    "llama zero1": {"kind": "llama", "zero": 1, "activation_checkpointing": "all"},
    "llama zero2": {"kind": "llama", "zero": 2, "variant": "preserve"},
    "llama zero3": {"kind": "llama", "zero": 3, "data__replay_loss": "kl"},
    "granite zero3": {"kind": "granite", "zero": 3, "activation_checkpointing": "collaborative"},
    "deepseek_v3 zero3": {"kind": "deepseek_v3", "zero": 3, "activation_checkpointing": "all"},
    "qwen3_next zero2": {"kind": "qwen3_next", "zero": 2},
    "mamba zero3": {"kind": "mamba", "zero": 3, "variant": "preserve"},
}


def method(variant: str, kind: str) -> dict[str, Any]:
    heads = 2 if kind == "mamba" else 4
    widths = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": heads}
    settings = {"name": "scale", "variant": variant, "expansion": widths}
    if variant == "adapt":
        settings |= {"l_fp": 1, "collaborative_modules": "both"}
    return settings


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    kinds = sorted({run["kind"] for run in RUNS.values()})
    return {kind: save_hosted(kind, folder / kind) for kind in kinds}


@pytest.fixture(scope="module")
def runs(tokens, bases, tmp_path_factory):
    """The folder of all runs, and what the ranks of each undisturbed one held at its end."""
    folder = tmp_path_factory.mktemp("hosted_runs")

    def jobs(name, make, job):
        for run, changes in RUNS.items():
            changes = dict(changes)
            kind = changes.pop("kind")
            config = make(
                folder / name / run.replace(" ", "_"),
                tokens,
                base=str(bases[kind]),
                base_code="transformers",
                schedule__steps=STEPS,
                method=method(changes.pop("variant", "adapt"), kind),
                **changes,
            )
            yield partial(job, config)

    found = run_ranks(in_turn, 2, list(jobs("undisturbed", make_run, train_and_look)))
    alone = run_ranks(in_turn, 1, list(jobs("alone", make_run, train_and_look)))
    stopped = run_ranks(in_turn, 2, list(jobs("stopped", make_run, partial(train, stop=True))))
    assert stopped == [[RESUME_LATER] * len(RUNS)] * 2
    shutil.copytree(folder / "stopped", folder / "resumed")
    resumed = run_ranks(in_turn, 2, list(jobs("resumed", write_config, train)))
    assert resumed == [[0] * len(RUNS)] * 2
    by_run = dict(zip(RUNS, zip(*found, strict=True), strict=True))
    return folder, by_run, dict(zip(RUNS, alone[0], strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_train_what_one_trains(runs, run):
    folder, two, one = runs
    for rank in two[run]:
        assert not isinstance(rank, str), rank
        assert rank["step0_max_abs_logit_difference"] == 0.0
        assert rank["trainable_parameters"] == one[run]["trainable_parameters"]
        for name, parameter in rank["parameters"].items():
            alone = one[run]["parameters"][name]
            # AdamW divides gradients near 0 by their own size: rounding grows there.
            torch.testing.assert_close(parameter, alone, rtol=0, atol=1e-4, msg=name)
    name = run.replace(" ", "_")
    found = losses(folder / "undisturbed" / name)
    torch.testing.assert_close(found, losses(folder / "alone" / name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_the_base_is_what_transformers_loads_to_the_bit(runs, bases, run):
    _, two, _ = runs
    theirs = dict(by_transformers(opened(bases[RUNS[run]["kind"]])).named_parameters())
    for rank in two[run]:
        of_base = {
            name.removeprefix("base."): parameter
            for name, parameter in rank["parameters"].items()
            if name.startswith("base.")
        }
        assert of_base.keys() == theirs.keys()
        for name, parameter in of_base.items():
            assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_run_resumes_to_the_bit(runs, run):
    folder, _, _ = runs
    name = run.replace(" ", "_")
    assert len(losses(folder / "stopped" / name)) == 1
    assert metrics(folder / "resumed" / name) == metrics(folder / "undisturbed" / name)
