"""Every DeepSpeed file that comes with the project trains, with activation checkpointing, and holds what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.training.runs import losses, make_run, train_and_look

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
STEPS = 3


@pytest.fixture(scope="module")
def in_fp32(tokens, tmp_path_factory) -> list[float]:
    """The losses of the same steps in fp32 on one rank."""
    folder = tmp_path_factory.mktemp("fp32")
    run_ranks(train_and_look, 1, make_run(folder, tokens, zero=1, schedule__steps=STEPS))
    return losses(folder)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_trains(file, tokens, tmp_path, in_fp32):
    config = make_run(
        tmp_path, tokens, deepspeed=str(file), schedule__steps=STEPS, activation_checkpointing="collaborative"
    )
    for found in run_ranks(train_and_look, 2, config):
        assert found["step0_max_abs_logit_difference"] == 0.0
        assert found["optimizer_state_elements"] == pytest.approx(2 * found["trainable_parameters"], rel=0.02)
        assert all(bool(found["parameters"][name].any()) for name in found["parameters"] if "expansion_to_base" in name)
    # bf16 keeps 8 bits: a percent on a loss, and three steps of it.
    assert losses(tmp_path) == pytest.approx(in_fp32, rel=3e-2)
