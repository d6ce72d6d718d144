"""On one data-parallel rank ZeRO-1 leaves the gradients where they are, and a run is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from torch import Tensor

from pipeline.training.deepspeed_internals import gradients_in_place
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train


def _train(config: Path, *, copied: bool) -> bool:
    """Trains, with DeepSpeed's copies or as it is; returns whether any gradient was left."""
    left = []

    def leave(parameter: Tensor, group: int) -> None:
        left.append(group)

    name = "leave_gradients_in_place" if copied else "_nothing_to_reduce"
    with patch.object(gradients_in_place, name, _do_nothing if copied else leave):
        train(config)
    return bool(left)


def _do_nothing(*_: object) -> None:
    """In place of `leave_gradients_in_place`."""


def _weights(run: Path) -> dict[str, Tensor]:
    """What the last checkpoint holds: weights and moments."""
    values: dict[str, Tensor] = {}
    for file in sorted(run.glob("checkpoints/*/*.safetensors")):
        values |= load_file(file)
    assert values
    return values


@pytest.mark.parametrize(
    ("zero", "tp_size", "expected"), [(1, 1, True), (1, 2, True), (2, 1, False)]
)
def test_a_run_has_the_same_bits(tokens: Path, tmp_path: Path, zero, tp_size, expected):
    """Four micro-batches a step, whose gradients are summed; to the bit: nothing is computed
    otherwise."""
    changes: dict[str, Any] = {
        "method": {"name": "fft"},
        "schedule__steps": 3,
        "parallel__tp_size": tp_size,
        "checkpoints__every_steps": 3,
    }
    jobs = []
    for name, copied in (("plain", True), ("in_place", False)):
        config = make_run(tmp_path / name, tokens, zero=zero, **changes)
        jobs.append(partial(_train, config, copied=copied))
    assert run_ranks(in_turn, tp_size, jobs) == [[False, expected]] * tp_size
    assert metrics(tmp_path / "in_place") == metrics(tmp_path / "plain")
    in_place = _weights(tmp_path / "in_place")
    plain = _weights(tmp_path / "plain")
    assert in_place.keys() == plain.keys()
    for name, value in plain.items():
        assert in_place[name].equal(value), name


def test_ranks_that_share_the_data_reduce_their_gradients(tokens: Path, tmp_path: Path):
    config = make_run(tmp_path, tokens, zero=1, method={"name": "fft"}, schedule__steps=1)
    assert run_ranks(partial(_train, copied=False), 2, config) == [False, False]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_trains_on_one_rank(tokens: Path, tmp_path: Path, zero):
    """The shipped configurations, whose optimizers differ: none has a gradient left in place."""
    config = make_run(
        tmp_path,
        tokens,
        deepspeed=f"ds_configs/zero{zero}.json",
        method={"name": "fft"},
        schedule__steps=2,
    )
    assert run_ranks(partial(_train, copied=False), 1, config) == [False]
    first, last = losses(tmp_path)
    assert last != first
