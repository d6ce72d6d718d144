"""A number that is none: a fault that passes leaves no trace, one that stays costs its own step and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.training.divergence import REPORT
from tests.distributed import RankError, run_ranks
from tests.training.faults import Planned, train_with, train_without
from tests.training.runs import make_run, metrics, train

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# ZeRO stage, ranks, tensor-parallel size, and what else DeepSpeed is told.
LAYOUTS = {
    "ZeRO-1": (1, 2, 1, {}, {}),
    "ZeRO-2": (2, 2, 1, {}, {}),
    "ZeRO-3": (3, 2, 1, {}, {}),
    "ZeRO-2, bf16": (2, 2, 1, BF16, {}),
    "ZeRO-3, bf16": (3, 2, 1, BF16, {}),
    "ZeRO-2, offloaded": (2, 2, 1, {}, OFFLOAD),
    "ZeRO-3, offloaded": (3, 2, 1, {}, OFFLOAD),
    "ZeRO-1 x tp 2": (1, 2, 2, {}, {}),
}


def make(folder, tokens, layout: str, **changes: Any):
    zero, world_size, tp_size, values, sharding = LAYOUTS[layout]
    config = make_run(folder, tokens, zero=zero, parallel__tp_size=tp_size, schedule__steps=4, **changes)
    told = json.loads((folder / f"zero{zero}.json").read_text())
    (folder / f"zero{zero}.json").write_text(
        json.dumps({**told, **values, "zero_optimization": {**told["zero_optimization"], **sharding}})
    )
    return config, world_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_that_passes_leaves_no_trace_and_one_that_stays_costs_its_step(tokens, tmp_path, layout):
    planned = (Planned("infinite loss", 2, times=1), Planned("nan gradient", 3, times=2))
    config, world_size = make(tmp_path / "run", tokens, layout)
    assert run_ranks(train_with, world_size, config, *planned) == [0] * world_size
    found = metrics(tmp_path / "run")
    assert found[2].pop("recomputed_steps") == 1
    assert found[3] == {"step": 3, "skipped_steps": 1}

    config, world_size = make(tmp_path / "without", tokens, layout)
    run_ranks(train_without, world_size, config, 3)
    assert found == metrics(tmp_path / "without")


def test_the_other_faults_are_found_too(tokens, tmp_path):
    planned = (Planned("nan gradient", 2, times=1), Planned("infinite loss", 3, times=2))
    config, _ = make(tmp_path, tokens, "ZeRO-3")
    assert run_ranks(train_with, 2, config, *planned) == [0, 0]
    assert [line.get("recomputed_steps") for line in metrics(tmp_path)] == [None, None, 1, None, None]
    assert [line.get("skipped_steps") for line in metrics(tmp_path)] == [None, None, None, 1, None]


def test_a_run_that_goes_on_remembers_what_it_skipped(tokens, tmp_path):
    config, _ = make(tmp_path / "run", tokens, "ZeRO-1", checkpoints={"every_steps": 3})
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(_skip_and_die, 2, config)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000003" / "manifest.json").read_text())
    assert manifest["position"]["skipped_steps"] == [2]
    assert run_ranks(train, 2, config) == [0, 0]

    config, _ = make(tmp_path / "without", tokens, "ZeRO-1")
    run_ranks(train_without, 2, config, 2)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "without")


def _skip_and_die(config):
    return train_with(config, Planned("nan gradient", 2, times=2), Planned("death", 4, times=1))


def test_too_many_end_the_run_with_a_report(tokens, tmp_path):
    config, _ = make(tmp_path, tokens, "ZeRO-3", stability={"max_skipped_steps": 0})
    with pytest.raises(RankError, match=r"DivergenceError: step 2: 1 steps were skipped, more than stability.max"):
        run_ranks(train_with, 2, config, Planned("nan gradient", 2, times=2))
    report = json.loads((tmp_path / REPORT).read_text())
    assert (report["step"], report["skipped_steps"]) == (2, [2])
    assert not (tmp_path / "checkpoints").exists()


def test_settings_that_would_let_it_through_are_refused(tokens, tmp_path):
    told = {"bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": 2}}
    config = make_run(tmp_path, tokens, zero=2)
    (tmp_path / "zero2.json").write_text(json.dumps(told))
    with pytest.raises(
        RankError, match=r"ConfigError: .*bf16.check_grad_overflow: a gradient that is not finite would"
    ):
        run_ranks(train, 1, config)
