"""Learning rates by group: a factor scales the steps of its parameters, under every ZeRO stage and
by Muon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.training.runs import make_run, train_and_look

HALVED = "expansion_to_base"
ADAPT = {
    "name": "scale",
    "variant": "adapt",
    "l_fp": 3,
    "expansion": {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
}


def after_a_step(
    folder: Path, tokens: Path, zero: int, optimizer: str, factors: dict[str, float]
) -> dict[str, torch.Tensor]:
    config = make_run(
        folder,
        tokens,
        zero=zero,
        method=ADAPT,
        schedule__steps=1,
        schedule__optimizer=optimizer,
        schedule__learning_rate_factors=factors,
    )
    return run_ranks(train_and_look, 2, config)[0]["parameters"]


@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [
        (1, "adamw"),
        (3, "muon"),
        pytest.param(2, "muon", marks=pytest.mark.full),
        pytest.param(3, "adamw", marks=pytest.mark.full),
    ],
)
def test_a_factor_scales_the_first_step_of_its_parameters_alone(tokens, tmp_path, zero, optimizer):
    """W12 starts at zero, and a half is exact: half the rate is half the value, to the bit."""
    plain = after_a_step(tmp_path / "plain", tokens, zero, optimizer, {})
    halved = after_a_step(tmp_path / "halved", tokens, zero, optimizer, {HALVED: 0.5})
    moved = 0
    for name, value in plain.items():
        if f".{HALVED}." in name:
            assert torch.equal(halved[name], value / 2), name
            moved += int(value.any())
        else:
            assert torch.equal(halved[name], value), name
    assert moved > 0
