"""The chunked loss: plain cross-entropy and its gradients, without ever holding the logits of a
batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import pipeline.model.output as output
from pipeline.model.families import hf_tensor
from pipeline.parallel.parameters import named_trained_parameters
from tests.bases import reference
from tests.tolerances import PARITY, assert_near
from tests.widened import (
    METHODS,
    Watched,
    balance_router,
    plain_logits,
    some_batch,
    some_tokens,
    trained_gradients,
    unwidened,
    widened,
)

LOSSES = ("preserve", "adapt", "route", "fft")


def model_of(base, method):
    if method == "fft":
        return unwidened(base)
    model = widened(base, METHODS[method], noise=0.1)
    if method == "route":
        balance_router(model, some_tokens(base.spec, 2, 24))
    return model


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, name) for method in LOSSES for name in ("llama", "neox tied")),
        ("adapt", "gemma2"),
    ],
)
def test_loss_and_gradients_equal_plain_cross_entropy_for_any_chunk(
    base, name, method, monkeypatch
):
    model = model_of(base(name), method)
    tokens, targets = some_batch(model.spec, 2, 24)
    logits = plain_logits(model, model.hidden_states(tokens))
    expected_nll = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
    (3.0 * expected_nll.sum()).backward()
    expected = trained_gradients(model)
    for rows in (1, 7, 48, 1000):
        model.zero_grad()
        monkeypatch.setattr(output, "CHUNK_ELEMENTS", rows * model.spec.vocab_size)
        total, nll, *_ = model(tokens, targets)
        assert_near(nll, expected_nll, PARITY)
        assert torch.equal(nll[targets == -100], torch.zeros(2))
        assert_near(total, expected_nll.sum(), PARITY)
        (3.0 * total).backward()
        for parameter, gradient in trained_gradients(model).items():
            assert expected[parameter].any(), f"{parameter} is not reached"
            assert_near(gradient, expected[parameter], PARITY, parameter)
        chosen = model.logits(tokens).argmax(dim=-1)
        guesses = torch.where(targets % 2 == 0, chosen, targets)
        with torch.no_grad():
            assert torch.equal(model(tokens, guesses).is_greedy_choice, chosen == guesses)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe dense layer", "qwen2_moe"])
def test_experts_are_balanced_as_transformers_does_in_each_sequence(base, name):
    """With no target to predict, the loss is the one that balances experts alone."""
    model, theirs = unwidened(base(name)), reference(base(name).path)
    tokens, coefficient = some_tokens(model.spec, 3, 24), theirs.config.router_aux_loss_coef
    total, *_ = model(tokens, torch.full_like(tokens, -100))
    losses = [theirs(row, output_router_logits=True).aux_loss for row in tokens.split(1)]
    assert_near(total, coefficient * 24 * sum(losses), PARITY)
    total.backward()
    (coefficient * 24 * sum(losses)).backward()
    expected = dict(theirs.named_parameters())
    reached = 0
    for parameter, gradient in trained_gradients(model).items():
        of_theirs = expected.get(
            hf_tensor(parameter, model.spec).name.replace("block_sparse_moe", "mlp")
        )
        if of_theirs is not None:
            own = torch.zeros_like(gradient) if of_theirs.grad is None else of_theirs.grad
            assert_near(gradient, own, PARITY, parameter)
            reached += parameter.endswith("router.weight") and bool(own.any())
    assert reached == sum(layer.has_experts for layer in model.spec.layers)
    with torch.no_grad():
        assert model(tokens, torch.full_like(tokens, -100)).total == 0


@pytest.mark.parametrize("method", LOSSES)
def test_the_logits_of_a_batch_are_never_held(base, method, monkeypatch):
    model = model_of(base("llama"), method)
    vocab_size = model.spec.vocab_size
    chunk = 16  # rows of logits at a time, of 128 in the batch
    monkeypatch.setattr(output, "CHUNK_ELEMENTS", chunk * vocab_size)
    heights = []
    saved_shapes = []

    def look(operation, taken, made):
        for tensor in made:
            if tensor.dim() > 0 and tensor.shape[-1] == vocab_size:
                heights.append(tensor.numel() // vocab_size)

    def save(tensor):
        saved_shapes.append(tensor.shape)
        return tensor

    with (
        Watched(look),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        model(*some_batch(model.spec, 2, 64))[0].backward()
    # Not only logits have V columns: [V, D].T, the transposed output projection, has D rows.
    assert chunk <= max(heights) <= max(chunk, model.spec.widths.hidden_size)
    assert saved_shapes
    for shape in saved_shapes:
        # The output projection itself is saved: its first dimension is V.
        assert vocab_size not in shape[1:], "logits are kept for the backward pass"


@pytest.mark.parametrize("method", LOSSES)
def test_sixteen_bit_gradients_follow_the_exact_ones(base, method):
    """The weights' gradients are summed in fp32: a sum in sixteen bits would stop growing."""
    exact = model_of(base("llama"), method)
    rounded = model_of(base("llama"), method).bfloat16()
    batch = some_batch(exact.spec, 2, 24)
    exact(*batch)[0].backward()
    total, nll, *_ = rounded(*batch)
    assert total.dtype == nll.dtype == torch.float32
    total.backward()
    parameters = dict(named_trained_parameters(exact))
    for name, parameter in named_trained_parameters(rounded):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.bfloat16
        cosine = F.cosine_similarity(
            parameter.grad.float().flatten(), parameters[name].grad.flatten(), dim=0
        )
        assert cosine > 0.9, name
