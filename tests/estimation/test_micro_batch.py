"""A micro-batch on tensors without data costs what it costs with data."""

from __future__ import annotations

import pytest
import torch

from pipeline.estimation.live_memory import LiveMemory
from pipeline.estimation.micro_batch import measure_micro_batch
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import Layout
from tests.estimation.real_runs import METHODS, real_batch, real_model, run_config

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPE = torch.bfloat16


@pytest.fixture
def config_of(tmp_path):
    return lambda method, **changes: run_config(tmp_path, "zero1", method, Layout(1), **changes)


def estimated(config):
    return measure_micro_batch(config, read_spec(config.base), 1, config.activation_checkpointing, DTYPE)


def saved_bytes(model, batch):
    """What autograd saves of a real forward pass, each storage once, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*batch)[0]
    assert loss.requires_grad
    inputs = {tensor.untyped_storage().data_ptr() for tensor in batch}
    return sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in inputs)


@pytest.mark.parametrize("mask", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("method", METHODS)
def test_activations_are_what_autograd_saves(config_of, method, mask):
    config = config_of(method, data__document_mask=mask)
    tokens, targets, positions, document_ids = real_batch(config)
    batch = (tokens, targets, positions, document_ids) if mask else (tokens, targets, positions)
    saved = saved_bytes(real_model(config, DTYPE), batch)
    assert saved > 0
    assert estimated(config).activation_bytes == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("checkpointing", ["none", "collaborative", "all"])
@pytest.mark.parametrize("method", ["adapt", "route", "fft"])
def test_the_largest_moment_is_that_of_a_real_pass(config_of, method, checkpointing):
    config = config_of(method, activation_checkpointing=checkpointing)
    model, batch = real_model(config, DTYPE), real_batch(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with LiveMemory(*model.parameters()) as live:
        total, *_ = model(*batch)
        total.backward()
    costs = estimated(config)
    assert costs.activation_bytes + costs.loss_bytes + costs.temporary_bytes == live.peak


def test_checkpointing_keeps_less_and_recomputes_more(config_of):
    none, every = (estimated(config_of("adapt", activation_checkpointing=one)) for one in ("none", "all"))
    assert every.activation_bytes < none.activation_bytes / 2
    assert every.temporary_bytes > none.temporary_bytes
    assert len(every.fetches) > len(none.fetches)


def test_live_memory_counts_storages_once_and_lets_them_go():
    before = torch.ones(100)
    with LiveMemory(before) as live:
        first = torch.ones(1000)
        view = first[:10].view(2, 5)
        before.add_(1)
        assert live.now == 4000
        second = first + 1
        assert live.now == live.peak == 8000
        del first
        assert live.now == 8000  # the view holds it
        del view, second
        assert live.now == 0
        live.restart_peak()
        assert live.peak == 0
