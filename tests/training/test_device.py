"""What a run asks of its device before it trains: where weights are made, and which kernels compute."""

from __future__ import annotations

import os
from functools import partial

import torch

from pipeline.config.run import load_config
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, start_deepspeed


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


def test_under_zero_1_and_2_no_weight_is_made_in_host_memory(tokens, tmp_path):
    lora = {"method": {"name": "lora", "rank": 2}, "base_precision": "nf4"}
    configs = [make_run(tmp_path / str(len(own)), tokens, zero=2, **own) for own in ({}, lora)]
    assert run_ranks(in_turn, 1, [partial(devices, config) for config in configs]) == [[{"meta"}] * 2]


def kernels():
    from pipeline.training.launch import use_deterministic_kernels

    use_deterministic_kernels()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    return torch.are_deterministic_algorithms_enabled(), cudnn, os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_a_deterministic_run_asks_for_deterministic_kernels():
    assert run_ranks(kernels, 1) == [(True, False, ":4096:8")]
