"""The paper's theorems, as equalities where it proves equality."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.parallel.parameters import named_trained_parameters
from tests.bases import FEATURES
from tests.widened import (
    balance_router,
    scale_settings,
    shake,
    some_batch,
    some_tokens,
    unwidened,
    widened,
)

NAMES = ("llama", "llama tied", "neox", "neox sequential", "stories260K", *FEATURES)


def base_streams(model, tokens, path="model"):
    """The base stream after every layer and after the final norm, and the logits."""
    streams = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: streams.append(out[0]))
        for layer in model.layers
    ]
    with torch.no_grad():
        x = model.hidden_states(tokens, path=path).x
    for hook in hooks:
        hook.remove()
    return [*streams, x, F.linear(x, model.output.base)]


def assert_same_streams(found, expected):
    assert len(found) == len(expected) > 2
    for layer, (stream, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(stream, other), f"the base stream differs behind layer {layer}"


def train(model, steps=4):
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in named_trained_parameters(model)], lr=1e-2
    )
    for step in range(steps):
        loss, *_ = model(*some_batch(model.spec, 2, 32, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "norm"), [*((name, "separate") for name in NAMES), ("llama", "base"), ("neox", "base")]
)
def test_theorem_3_1_preserve_keeps_the_base_stream_to_the_bit_through_training(base, name, norm):
    """And, by Corollary 3.2, whatever W21 and W22 are."""
    tokens = some_tokens(base(name).spec, 2, 32, seed=9)
    expected = base_streams(unwidened(base(name)), tokens)
    model = widened(base(name), scale_settings("preserve", norm=norm))
    assert_same_streams(base_streams(model, tokens), expected)

    before = {key: parameter.detach().clone() for key, parameter in named_trained_parameters(model)}
    train(model)
    unchanged = [
        key
        for key, parameter in named_trained_parameters(model)
        if torch.equal(parameter, before[key])
    ]
    assert not unchanged, "training left blocks of the expansion where they were"
    assert_same_streams(base_streams(model, tokens), expected)
    shift = model.logits(tokens).flatten(0, 1) - expected[-1]
    assert shift.abs().mean() > 1e-2, "the expansion stream does not reach the logits"
    shake(model, 1.0)
    assert_same_streams(base_streams(model, tokens), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_preserved_and_base_paths_of_a_trained_model_are_the_base(base, name):
    tokens = some_tokens(base(name).spec, 2, 32)
    expected = base_streams(unwidened(base(name)), tokens)
    model = widened(base(name), scale_settings("adapt", collaborative_modules="both"), noise=0.1)
    assert_same_streams(base_streams(model, tokens, "preserved"), expected)
    assert_same_streams(base_streams(model, tokens, "base"), expected)
    assert torch.equal(model.logits(tokens, path="base"), unwidened(base(name)).logits(tokens))
    adapted = base_streams(model, tokens)
    assert_same_streams([*adapted[:1], *expected[1:]], expected)
    assert not torch.equal(adapted[1], expected[1]), (
        "W12 leaves the first collaborative layer as it was"
    )


@pytest.mark.parametrize(
    ("name", "modules"), [("llama", "attention"), ("llama", "ffn"), ("neox", "both")]
)
def test_masking_every_w12_turns_adapt_into_preserve_to_the_bit(base, name, modules):
    tokens = some_tokens(base(name).spec, 2, 32)
    adapt = widened(base(name), scale_settings("adapt", collaborative_modules=modules), noise=0.1)
    preserve = widened(base(name), scale_settings("preserve"), noise=0.1)
    assert not torch.equal(adapt.logits(tokens), preserve.logits(tokens))
    assert torch.equal(adapt.logits(tokens, path="preserved"), preserve.logits(tokens))
    with torch.no_grad():
        for key, parameter in adapt.named_parameters():
            if "expansion_to_base" in key:
                parameter.zero_()
    assert torch.equal(adapt.logits(tokens), preserve.logits(tokens))


@pytest.mark.parametrize("variant", ["adapt", "route"])
def test_lemma_d_8_preserved_logits_give_no_gradient_to_w12(base, variant):
    model = widened(base("llama"), scale_settings(variant, collaborative_modules="both"), noise=0.1)
    tokens, targets = some_batch(model.spec, 2, 32)
    loss, *_ = model.output(model.hidden_states(tokens, path="preserved"), targets.flatten())
    loss.backward()
    parameters = list(named_trained_parameters(model))
    w12 = [parameter for key, parameter in parameters if "expansion_to_base" in key]
    assert len(w12) == 2 * 7
    assert all(parameter.grad is None for parameter in w12)
    assert all(
        parameter.grad.any() for key, parameter in parameters if "expansion_to_base" not in key
    )


@pytest.mark.parametrize("threshold", [-1.0, 1.0])
def test_preserved_tokens_of_route_are_bit_identical_to_the_base(base, threshold):
    """Z_p within Route is the base model's, whatever is trained."""
    tokens = some_tokens(base("llama").spec, 2, 32)
    model = widened(base("llama"), scale_settings("route", router_threshold=threshold), noise=0.1)
    hidden = model.hidden_states(tokens)
    assert torch.equal(hidden.preserved_x, base_streams(unwidened(base("llama")), tokens)[-2])
    balance_router(model, tokens)
    train(model)
    trained = model.hidden_states(tokens)
    assert torch.equal(trained.preserved_x, hidden.preserved_x)
    assert not torch.equal(trained.x, hidden.x)
