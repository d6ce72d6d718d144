"""What a gate leaves closed is the base's to the last bit; what it opens is the trained model's."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch

from pipeline.parallel.topology import SINGLE, TensorParallel
from tests.extensions.gate.gates import random_gate
from tests.widened import packed, scale_settings, some_batch, some_tokens, widened

BASES = [
    ("llama tied", torch.float32),
    ("llama tied", torch.bfloat16),
    ("neox sequential", torch.bfloat16),
]
BASES += [("qwen3_moe dense layer", torch.float32), ("qwen3_moe", torch.bfloat16)]
VARIANTS = ["preserve", "adapt", "route"]


@cache
def _trained(opened, variant):
    module = {} if variant == "preserve" else {"collaborative_modules": "both"}
    return widened(opened, scale_settings(variant, **module), noise=0.1).eval()


def trained(base, name, variant, dtype=torch.float32):
    """A widened model whose every added block matters."""
    return deepcopy(_trained(base(name), variant)).to(dtype)


def batch_of(model):
    """Tokens of two rows, with two documents in the first and three in the second, and their
    positions."""
    return some_tokens(model.spec, 2, 24), *packed((9, 15), (4, 8, 12))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "dtype"), [*BASES, ("neox", torch.float32)])
def test_a_gate_that_never_opens_leaves_the_base(name, variant, dtype, base):
    model = trained(base, name, variant, dtype)
    batch = batch_of(model)
    ungated, base_logits = model.logits(*batch), model.logits(*batch, path="base")
    assert (ungated - base_logits).abs().max() > 0.1
    model.gate = random_gate(model, batch[0], opens="never")
    assert torch.equal(model.logits(*batch), base_logits)
    with torch.no_grad():
        assert torch.equal(
            model.hidden_states(*batch).x, model.hidden_states(*batch, path="base").x
        )
        tokens, targets = some_batch(model.spec, 2, 24)
        of_base = model.output(model.hidden_states(tokens, path="base"), targets.flatten()).nll
        assert torch.equal(model(tokens, targets).nll.flatten(), of_base)


@pytest.mark.parametrize("variant", ["preserve", "adapt"])
@pytest.mark.parametrize(("name", "dtype"), BASES)
def test_a_gate_that_opens_everywhere_leaves_the_trained_model(name, variant, dtype, base):
    model = trained(base, name, variant, dtype)
    batch = batch_of(model)
    ungated = model.logits(*batch)
    model.gate = random_gate(model, batch[0], opens="always")
    assert torch.equal(model.logits(*batch), ungated)


def test_an_open_token_of_route_takes_the_adapted_path_alone(base):
    model = trained(base, "llama tied", "route")
    batch = batch_of(model)
    model.output.threshold = 1.1  # the cosine would preserve none
    adapted = model.logits(*batch)
    model.output.threshold = -1.1
    model.gate = random_gate(model, batch[0], opens="always")
    assert torch.equal(model.logits(*batch), adapted)


@pytest.mark.parametrize("features", ["token", "token+running_mean"])
@pytest.mark.parametrize("variant", ["preserve", "route"])
@pytest.mark.parametrize(("name", "dtype"), BASES)
def test_in_mixed_text_every_closed_token_of_preserve_and_route_is_the_bases(
    name, variant, features, dtype, base
):
    model = trained(base, name, variant, dtype)
    batch = batch_of(model)
    base_logits = model.logits(*batch, path="base")
    model.gate = random_gate(model, batch[0], batch[2], features=features, opens="always")
    opened = model.logits(*batch)
    model.gate = random_gate(model, batch[0], batch[2], features=features)
    is_open = decisions(model, *batch)
    assert 8 < is_open.sum() < 40
    assert torch.equal(
        model.logits(*batch), torch.where(is_open.unsqueeze(-1), opened, base_logits)
    )


def decisions(model, tokens, positions=None, documents=None):
    stream = model.base_stream(tokens, positions, documents, layer=model.gate.layer)
    return model.gate.is_open(stream, documents.ids if documents else None)


@pytest.mark.parametrize(("name", "dtype"), BASES)
def test_in_mixed_text_adapt_is_the_bases_until_a_token_opens(name, dtype, base):
    """Later closed tokens read what open ones left behind; they differ from the trained model all
    the same."""
    model = trained(base, name, "adapt", dtype)
    batch = batch_of(model)
    ungated, base_logits = model.logits(*batch), model.logits(*batch, path="base")
    model.gate = random_gate(model, batch[0], batch[2])
    is_open, gated = decisions(model, *batch), model.logits(*batch)
    opened_before = torch.zeros_like(is_open)
    for document in range(3):
        inside = batch[2].ids == document
        opened_before |= inside & ((is_open & inside).cumsum(dim=1) > 0)
    assert (
        torch.equal(gated[~opened_before], base_logits[~opened_before])
        and (~opened_before).sum() > 2
    )
    later = opened_before & ~is_open
    assert (gated[later] != base_logits[later]).any() and (gated[later] != ungated[later]).any(
        -1
    ).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_decisions_read_no_trained_block(variant, base):
    model, other = (trained(base, "neox", variant) for _ in range(2))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".base." not in name and name != "output.base":
                parameter.add_(1.0)
    tokens = some_tokens(model.spec, 2, 24)
    model.gate = other.gate = random_gate(model, tokens)
    expected = decisions(model, tokens)
    assert torch.equal(decisions(other, tokens), expected)
    found = other.hidden_states(tokens).x_up.view(2, 24, -1).ne(0).any(-1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [2, 3])
@pytest.mark.parametrize(("name", "dtype"), BASES)
def test_a_gate_may_read_above_the_first_layer_with_w12(name, dtype, layer, base):
    """The layers between run twice; the gate's features stay the base's."""
    model = trained(base, name, "adapt", dtype)
    batch = batch_of(model)
    ungated, base_logits = model.logits(*batch), model.logits(*batch, path="base")
    for opens, expected in (("never", base_logits), ("always", ungated)):
        model.gate = random_gate(model, batch[0], batch[2], layer=layer, opens=opens)
        assert torch.equal(model.logits(*batch), expected)
    model.gate = random_gate(model, batch[0], batch[2], layer=layer)
    is_open, gated = decisions(model, *batch), model.logits(*batch)
    closed_so_far = torch.zeros_like(is_open)
    for document in range(3):
        inside = batch[2].ids == document
        closed_so_far |= inside & ((is_open & inside).cumsum(dim=1) == 0)
    assert torch.equal(gated[closed_so_far], base_logits[closed_so_far])
    assert closed_so_far.any()
    assert (gated != base_logits).any(-1)[is_open].all()


def test_a_gate_that_cannot_be_computed_is_refused(base):
    split = trained(base, "llama tied", "preserve")
    tokens = some_tokens(split.spec, 1, 4)
    split.gate = random_gate(split, tokens)
    split.tp = TensorParallel(rank=0, size=2, group=None)
    with pytest.raises(ValueError, match="whole on one rank"):
        split.logits(tokens)
    split.tp = SINGLE
    split.logits(tokens)
