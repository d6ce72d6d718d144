"""Rows, gains and low-rank differences that only open tokens read: exact where closed, effective where open."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import pipeline.model.output as output
from pipeline.config.method import Lora, ScaleMethod
from pipeline.model.open_weights import OwnRowOfToken, add_gradient_of_own_rows_, own_logits
from pipeline.parallel.parameters import full_shape_of, named_trained_parameters
from tests.extensions.gate.gates import random_gate
from tests.tolerances import PARITY, assert_near
from tests.widened import scale_settings, some_batch, some_tokens, trained_gradients, widened

OWN = {
    "rows": {"open_rows": {"min_count": 1}},
    "gains": {"open_gains": True},
    "low rank": {"low_rank": 2},
    "all three": {"open_rows": {"min_count": 1}, "open_gains": True, "low_rank": 2},
}
VARIANTS = {
    "preserve": {"open_first_layer": 1},
    "adapt": {"collaborative_modules": "both"},
    "adapt from the embedding on": {"collaborative_modules": "both", "l_fp": 0},
    "lora": {"target_modules": ("query", "value", "down")},
    "lora from layer 1 on": {"open_first_layer": 1, "alpha": 3},
}
# Llama, tied embeddings, LayerNorm with biases and parallel residuals, post-norms with soft-capping, norms of heads.
BASES = ["llama", "llama tied", "neox", "gemma2", "qwen3"]


def own_model(base, variant, own, *, noise=0.1):
    """A widened model with open weights, of every other token's rows."""
    changes = VARIANTS[variant] | OWN[own]
    settings: ScaleMethod | Lora
    if variant.startswith("lora"):
        # LoRA's open weights of low rank are its adapters.
        changes.pop("low_rank", None)
        settings = Lora(name="lora", rank=2, **changes)
    else:
        settings = scale_settings(variant.split()[0], **changes)
    return widened(base, settings, noise=noise).eval()


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", BASES)
def test_the_base_stays_and_open_tokens_change(base, name, variant, own):
    model = own_model(base(name), variant, own)
    tokens = some_tokens(model.spec, 2, 24)
    with_own = model.logits(tokens)
    of_base = model.logits(tokens, path="base")
    preserved = model.logits(tokens, path="preserved")
    if variant == "preserve":
        x_up_alone = (with_own - preserved).abs().max()
        assert x_up_alone > 0.01, "open weights have no effect"
    assert torch.equal(
        model.hidden_states(tokens, path="preserved").x, model.hidden_states(tokens, path="base").x
    )
    model.gate = random_gate(model, tokens, opens="never")
    assert torch.equal(model.logits(tokens), of_base)
    model.gate = random_gate(model, tokens, opens="always")
    assert torch.equal(model.logits(tokens), with_own)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_closed_beginning_is_the_base_and_what_opens_is_not(base, variant):
    """Attention is causal: tokens before the first open one see closed tokens alone."""
    model = own_model(base("llama"), variant, "all three")
    tokens = some_tokens(model.spec, 4, 24)
    of_base = model.logits(tokens, path="base")
    model.gate = random_gate(model, tokens, opens="sometimes")
    stream = model.base_stream(tokens, layer=model.gate.layer)
    is_open = model.gate.is_open(stream)
    before = is_open.cumsum(1) == 0
    assert before.any() and is_open.any()
    logits = model.logits(tokens)
    assert torch.equal(logits[before], of_base[before])
    assert ((logits - of_base).abs().amax(-1)[is_open] > 1e-4).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", BASES)
def test_everything_starts_at_zero_difference(base, name, variant):
    """What is added starts without an effect, as the expansion does."""
    model = own_model(base(name), variant, "all three", noise=0.0)
    tokens = some_tokens(model.spec, 2, 24)
    assert torch.equal(model.logits(tokens), model.logits(tokens, path="base"))


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2"])
@pytest.mark.parametrize("own", ["rows", "all three"])
def test_loss_and_gradients_equal_plain_cross_entropy_for_any_chunk(base, name, own, monkeypatch):
    model = own_model(base(name), "adapt", own)
    tokens, targets = some_batch(model.spec, 2, 24)
    hidden = model.hidden_states(tokens)
    out = model.output
    table = out.own_columns().row_of_column
    weight = out.base + out.own_rows[table]
    z = F.linear(hidden.x, weight) + F.linear(hidden.x_up, out.expansion)
    if out.softcap is not None:
        z = torch.tanh(z / out.softcap) * out.softcap
    expected_nll = F.cross_entropy(z, targets.flatten(), reduction="none").view(targets.shape)
    expected_nll.sum().backward()
    expected = trained_gradients(model)
    assert expected["output.own_rows"].abs().max() > 0
    for rows in (1, 7, 1000):
        model.zero_grad()
        monkeypatch.setattr(output, "CHUNK_ELEMENTS", rows * model.spec.vocab_size)
        total, nll, *_ = model(tokens, targets)
        assert_near(nll, expected_nll, PARITY)
        total.backward()
        for parameter, gradient in trained_gradients(model).items():
            assert_near(gradient, expected[parameter], PARITY)


def test_what_trains(base):
    model = own_model(base("llama"), "preserve", "all three")
    own = {name for name, _ in named_trained_parameters(model) if ".own" in name or "own_" in name}
    assert "own_input.rows.weight" in own and "output.own_rows" in own
    assert "final_norm.own.weight" in own and "layers.1.attention_norm.own.weight" in own
    assert not any(name.startswith("layers.0.") for name in own), "they begin at layer 1"
    shapes = dict(model.named_parameters())
    rows = len(range(0, model.spec.vocab_size, 2)) + 1
    assert full_shape_of(shapes["output.own_rows"]) == (rows, model.spec.widths.hidden_size)
    assert "layers.1.ffn.down.adapter.a" in shapes


@given(
    tokens=st.sets(st.integers(0, 30)),
    first=st.integers(0, 20),
    count=st.integers(1, 11),
    padding=st.integers(0, 3),
)
def test_columns_of_own_rows_are_a_matrix_product(tokens, first, count, padding):
    """Logits and gradients by columns equal those of a whole matrix of rows, autograd's."""
    ids = tuple(sorted(tokens))
    columns = OwnRowOfToken(ids, 31).columns(first, count, count + padding, torch.device("cpu"))
    row_of = [
        ids.index(token) if token in ids else len(ids) for token in range(first, first + count)
    ]
    row_of += [len(ids)] * padding
    assert columns.row_of_column.tolist() == row_of
    x = torch.randn(3, 5, dtype=torch.float64)
    own = torch.randn(len(ids) + 1, 5, dtype=torch.float64, requires_grad=True)
    logits = F.linear(x, own[torch.tensor(row_of)])
    assert torch.allclose(own_logits(x, own, columns), logits.float(), atol=1e-5)
    gradient = torch.randn(3, count + padding, dtype=torch.float64)
    (expected,) = torch.autograd.grad(logits, own, gradient)
    found = torch.zeros_like(own)
    add_gradient_of_own_rows_(found.detach(), gradient, x, columns)
    assert torch.allclose(found, expected, atol=1e-5)
