"""Activation checkpointing changes what is kept, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.model import recomputation
from pipeline.model.recomputation import gate_and_up_shapes
from pipeline.sizing.live_memory import LiveMemory
from tests.widened import (
    Watched,
    kept_for_backward,
    scale_settings,
    some_batch,
    trained_gradients,
    unwidened,
    widened,
)

OWN_WEIGHTS = scale_settings(
    "adapt",
    collaborative_modules="both",
    open_rows={"min_count": 1},
    open_gains=True,
    low_rank=2,
)


def step(base, variant, checkpointing):
    """Loss and gradients of one batch, and the bytes that the graph held for it."""
    if variant == "fft":
        model = unwidened(base)
        model.activation_checkpointing = checkpointing
    else:
        settings = OWN_WEIGHTS if variant == "open weights" else scale_settings(variant)
        model = widened(base, settings, noise=0.1, activation_checkpointing=checkpointing)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with kept_for_backward() as kept:
        loss, *_ = model(*some_batch(model.spec, 2, 64))
    held_bytes = sum(
        tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in parameters
    )
    loss.backward()
    return loss.detach(), trained_gradients(model), held_bytes


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("llama", "preserve"),
        ("neox", "adapt"),
        ("gemma3", "adapt"),
        ("llama", "route"),
        ("mixtral", "adapt"),
        ("mixtral", "fft"),
        ("llama", "open weights"),
    ],
)
def test_loss_and_gradients_are_identical_and_less_is_held(base, name, variant):
    loss, gradients, held = step(base(name), variant, "none")
    for checkpointing in ("collaborative", "all"):
        other_loss, other_gradients, other_held = step(base(name), variant, checkpointing)
        assert torch.equal(loss, other_loss)
        for parameter, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[parameter]), parameter
        nothing_to_drop = (variant, checkpointing) in (
            ("preserve", "collaborative"),
            ("fft", "all"),
        )
        assert other_held == held if nothing_to_drop else other_held < 0.8 * held
        held = other_held


def kept_step(base, variant, checkpointing, kept):
    """Loss, gradients, the bytes that are held for the backward pass, and how often the kernels of
    attention, and products of the size of gate and up maps, run."""
    if variant == "fft":
        model = unwidened(base)
        model.activation_checkpointing = checkpointing
    else:
        settings = OWN_WEIGHTS if variant == "open weights" else scale_settings(variant)
        model = widened(base, settings, noise=0.1, activation_checkpointing=checkpointing)
    model.kept_results = kept
    shapes = gate_and_up_shapes(model.layers[0])
    ran: Counter[str] = Counter()

    def count(operation, taken, made):
        if operation in recomputation._ATTENTION:
            ran["attention"] += 1
        weight = recomputation._PRODUCTS.get(operation)
        if weight is not None and taken[weight].shape[-2:] in shapes:
            ran["products"] += 1

    batch = some_batch(model.spec, 2, 64)
    with LiveMemory(*model.parameters()) as live, Watched(count):
        loss, *_ = model(*batch)
        held = live.now
        loss.backward()
    return loss.detach(), trained_gradients(model), held, ran


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("llama", "adapt"),
        ("neox", "adapt"),
        ("gemma3", "fft"),
        ("llama", "route"),
        ("mixtral", "adapt"),
        ("llama", "open weights"),
    ],
)
def test_what_is_kept_is_not_computed_again_and_changes_no_bit(base, name, variant):
    loss, gradients, most, once = kept_step(base(name), variant, "none", "nothing")
    held_bytes = []
    for kept in ("nothing", "attention", "products"):
        other_loss, other_gradients, held, ran = kept_step(base(name), variant, "all", kept)
        assert torch.equal(loss, other_loss)
        for parameter, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[parameter]), parameter
        held_bytes.append(held)
        assert (ran["attention"] == once["attention"]) == (kept != "nothing")
        assert (ran["products"] == once["products"]) == (kept == "products")
    assert held_bytes == sorted(set(held_bytes)), "each keeps more"
    if variant != "open weights":
        assert held_bytes[-1] < most


@pytest.mark.parametrize("kept", ["attention", "products"])
def test_other_operations_may_run_more_often_in_the_backward_pass(base, kept):
    """As those of ZeRO-3's gathers, which hooks of modules begin."""
    model = widened(base("llama"), scale_settings("adapt"), activation_checkpointing="all")
    model.kept_results = kept
    calls = []

    def gather(*_):
        calls.append(None)
        for _ in range(len(calls)):
            torch.ones(3).cos_()

    for layer in model.layers:
        layer.ffn.register_forward_pre_hook(gather)
    model(*some_batch(model.spec, 2, 64)).total.backward()
    assert len(calls) == 2 * len(model.layers)
