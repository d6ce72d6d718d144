"""Bases with norms of queries and keys, and after the layers' maps, train alike under every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from tests.conversion.checkpoints import FFT, save_many, scale, trained, zero
from tests.distributed import run_ranks

METHODS = {"adapt": scale("adapt", collaborative_modules="both"), "fft": FFT}
NAMES = ("qwen3", "olmo2", "gemma3")


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    places = {
        (name, method, stage): folder / f"{name}-{method}-{stage}"
        for name in NAMES
        for method in METHODS
        for stage in (1, 3)
    }
    jobs = [
        (base(name).path, METHODS[method], place, 1, zero(stage)) for (name, method, stage), place in places.items()
    ]
    run_ranks(save_many, 1, jobs)
    return places


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_zero_3_trains_what_zero_1_does(name, method, folders, base):
    whole, sharded = (trained(base(name).path, folders[name, method, stage]) for stage in (1, 3))
    assert whole.trained == sharded.trained
    assert any("query_norm" in parameter for parameter in whole.trained)
    for parameter in whole.trained:
        torch.testing.assert_close(sharded.read(parameter), whole.read(parameter), rtol=0, atol=1e-4)
