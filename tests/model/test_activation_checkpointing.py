"""Activation checkpointing changes what is kept, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.widened import (
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
    own_rows={"min_count": 1},
    own_gains=True,
    low_rank=2,
)


def step(base, variant, checkpointing):
    """Loss and gradients of one batch, and the bytes that the graph held for it."""
    if variant == "fft":
        model = unwidened(base)
        model.activation_checkpointing = checkpointing
    else:
        settings = OWN_WEIGHTS if variant == "own weights" else scale_settings(variant)
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
        ("llama", "own weights"),
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
