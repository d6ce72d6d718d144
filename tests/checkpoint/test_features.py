"""Bases with norms of queries and keys, and after the layers' maps, train alike under every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from tests.conversion.checkpoints import save_many, scale, trained, zero
from tests.distributed import run_ranks

ADAPT = scale("adapt", collaborative_modules="both")
NAMES = ("qwen3", "olmo2", "gemma3")


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    places = [(name, stage) for name in NAMES for stage in (1, 3)]
    jobs = [(base(name).path, ADAPT, folder / f"{name}-{stage}", 1, zero(stage)) for name, stage in places]
    run_ranks(save_many, 1, jobs)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_zero_3_trains_what_zero_1_does(name, folder, base):
    whole, sharded = (trained(base(name).path, folder / f"{name}-{stage}") for stage in (1, 3))
    assert whole.trained == sharded.trained and any("query_norm" in parameter for parameter in whole.trained)
    for parameter in whole.trained:
        torch.testing.assert_close(sharded.read(parameter), whole.read(parameter), rtol=0, atol=1e-4)
