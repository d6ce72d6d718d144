"""Self-generated text: the loss KL(base || model) on some sequences of a batch, against a literal
computation with autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pipeline.methods.registry import method_for
from pipeline.model.decoder import REFERENCE
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from tests.tolerances import PARITY, assert_near
from tests.widened import (
    METHODS,
    SEED,
    balance_router,
    plain_logits,
    shake,
    some_batch,
    some_tokens,
    trained_gradients,
    two_documents,
    unwidened,
    widened,
)

COEFFICIENT = 0.7


def model_beside_base(base, method, noise=0.1):
    """A model of any method away from its base, with a frozen copy of the base where it needs one."""
    settings = METHODS[method]
    if settings.name == "scale":
        model = widened(base, settings, noise=noise)
        if method == "route" and noise:
            balance_router(model, some_tokens(base.spec, 4, 24))
    else:
        baseline = method_for(settings, Path("unread"), SEED)
        model = baseline.build(base.spec, SINGLE, "none")
        if not model.keeps_base:
            model.add_reference()
        baseline.load(model, base, SINGLE)
        shake(model, noise / 2)
    model.output.kl_coefficient = COEFFICIENT
    return model


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, "llama tied") for method in METHODS),
        ("route", "neox"),
        ("adapt", "gemma2"),
        ("adapt", "mixtral"),
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(base, monkeypatch, method, name):
    monkeypatch.setattr(
        "pipeline.model.output.CHUNK_ELEMENTS", 97 * 30
    )  # borders of chunks within rows
    model, plain = model_beside_base(base(name), method), unwidened(base(name))
    tokens, targets = some_batch(model.spec, 4, 24)
    positions, documents = two_documents(tokens)
    losses = model(tokens, targets, positions, documents, 2, 3)
    losses.total.backward()
    gradients = {key: value.clone() for key, value in trained_gradients(model).items()}
    model.zero_grad()

    logits = plain_logits(model, model.hidden_states(tokens, positions, documents))
    with torch.no_grad():
        reference = plain.logits(tokens, positions, documents).flatten(0, 1).log_softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True).sum(-1)
    kl = kl.masked_fill(targets.flatten() == -100, 0).view(4, 24)
    nll = F.cross_entropy(logits, targets.flatten(), reduction="none").view(4, 24)
    expected = COEFFICIENT * kl[:2].sum() + nll[2:].sum()
    expected.backward()

    assert kl[:2].sum() > 0.1  # the model did leave its base
    assert not losses.nll[:2].any()
    assert not losses.kl[2:].any()
    # One product instead of two for Route's paths.
    assert_near(losses.kl[:2], kl[:2], PARITY, scale=nll)
    assert_near(losses.nll[2:], nll[2:], PARITY)
    assert_near(losses.total, expected, PARITY)
    for key, expected_gradient in trained_gradients(model).items():
        assert_near(gradients[key], expected_gradient, PARITY, key)


@pytest.mark.parametrize(
    ("method", "name"), [*((method, "llama") for method in METHODS), ("adapt", "mixtral")]
)
def test_at_the_base_neither_loss_nor_gradient_is_left(base, method, name):
    model = model_beside_base(base(name), method, noise=0.0)
    tokens, targets = some_batch(model.spec, 2, 24)
    losses = model(tokens, targets, None, None, 2, 2)
    assert not losses.kl.any()
    losses.total.backward()
    assert all(not gradient.any() for gradient in trained_gradients(model).values())


@pytest.mark.parametrize("method", METHODS)
def test_more_reference_sequences_than_kl_sequences_change_nothing(base, method):
    """A rank runs the base on as many rows as the rank that needs the most."""
    model = model_beside_base(base("llama"), method)
    tokens, targets = some_batch(model.spec, 3, 24)
    plain = model(tokens, targets)
    with_reference = model(tokens, targets, None, None, 0, 2)
    assert torch.equal(plain.nll, with_reference.nll)
    assert torch.equal(plain.total, with_reference.total)
    few = model(tokens, targets, None, None, 1, 1)
    many = model(tokens, targets, None, None, 1, 3)
    assert few.kl.sum() > 0
    # A product over more rows may round otherwise.
    assert_near(few.kl, many.kl, PARITY, scale=plain.nll)


def test_the_frozen_copy_of_the_base_does_not_train(base):
    model = model_beside_base(base("llama tied"), "fft", noise=0.0)
    copied = set()
    for name, _ in model.named_parameters():
        if name.startswith(REFERENCE):
            copied.add(name.removeprefix(REFERENCE))
    plain = unwidened(base("llama tied"))
    assert copied == dict(plain.named_parameters()).keys()

    trained = dict(named_trained_parameters(model))
    assert not any(name.startswith(REFERENCE) for name in trained)
    tokens = some_tokens(model.spec, 1, 8)
    before = plain.logits(tokens)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    model(*some_batch(model.spec, 2, 24)).total.backward()
    optimizer.step()
    assert torch.equal(model.reference.logits(tokens), before)
    assert not torch.equal(model.logits(tokens), before)
