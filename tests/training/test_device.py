"""What a run asks of its device before it trains: where weights are made, and which kernels compute."""

from __future__ import annotations

import os
from functools import partial
from unittest.mock import patch

import pytest
import torch

from pipeline.config.run import load_config
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, start_deepspeed, train

METHODS = {
    "scale": {},
    "lora on nf4": {"method": {"name": "lora", "rank": 2}, "base_precision": "nf4"},
    "llama_pro": {"method": {"name": "llama_pro", "added_layers": 5}},
}


def devices(config):
    """The devices of a model that was made, and loaded, for a device whose memory is not the host's."""
    start_deepspeed()
    from pipeline import methods
    from pipeline.checks.door import read_inputs
    from pipeline.parallel.topology import ProcessGroups
    from pipeline.training.engine import build_model

    inputs = read_inputs(load_config(config), 1)
    groups = ProcessGroups(inputs.layout)
    model = build_model(inputs.config, inputs.base, inputs.deepspeed_config, groups, torch.device("meta"))
    methods.training_method(inputs.config).load(model, inputs.base, groups.tensor_parallel)
    return {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("method", METHODS)
def test_under_zero_1_and_2_no_weight_is_made_in_host_memory(tokens, tmp_path, method):
    config = make_run(tmp_path, tokens, zero=2, **METHODS[method])
    assert run_ranks(devices, 1, config) == [{"meta"}]


def kernels(config):
    """What a run with `deterministic` has set when it builds its model."""
    from pipeline.training import run

    seen = []
    load_model = run.load_model

    def looked(*arguments):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()))
        return load_model(*arguments)

    with patch.object(run, "load_model", looked):
        assert train(config) == 0
    return *seen[0], os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_a_deterministic_run_asks_for_deterministic_kernels(tokens, tmp_path):
    plain, deterministic = (
        make_run(tmp_path / str(wanted), tokens, zero=1, schedule__steps=1, deterministic=wanted)
        for wanted in (False, True)
    )
    [found] = run_ranks(in_turn, 1, [partial(kernels, config) for config in (plain, deterministic)])
    assert found == [(False, True, None), (True, False, ":4096:8")]
