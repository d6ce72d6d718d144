"""Rows, gains and low-rank differences that only open tokens read on a hosted base: exact where closed,
effective where open."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import BaseModelError
from pipeline.model.from_hf import is_base
from tests.extensions.gate.gates import random_gate
from tests.extensions.hosted.bases import by_transformers, hosted, saved_in
from tests.widened import packed, some_batch, some_tokens, trained_gradients

FULL = pytest.mark.full
# Norms of heads and hybrid layers, latent attention and experts, LayerNorm with maps stored
# [in, out] and learned positions, parallel residuals, factors with tied rows, gains 1 + w with
# soft-capping and norms after, a state space.
KINDS = ["qwen3_next", "deepseek_v3", "gpt2", "phi", "granite", "gemma2", "mamba", "qwen3_moe"]
CASES = ["llama", *[pytest.param(kind, marks=FULL) for kind in KINDS]]
ROWS_AND_GAINS = {"open_rows": {"min_count": 1}, "open_gains": True}
OWN = {**ROWS_AND_GAINS, "low_rank": 2}
VARIANTS = {
    "adapt": OWN,
    "preserve": {**OWN, "open_first_layer": 1},
    "lora": {**ROWS_AND_GAINS, "open_first_layer": 1, "alpha": 3.0},
}
NOISE = 0.05


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("hosted"))


def of_transformers(folder, tokens):
    with torch.no_grad():
        return by_transformers(folder)(tokens, use_cache=False).logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", CASES)
def test_step_zero_is_the_base_to_the_bit(base, kind, variant):
    folder = base(kind)
    model = hosted(folder, variant, **VARIANTS[variant])
    tokens = some_tokens(folder.spec, 2, 20)
    assert torch.equal(model.logits(tokens), of_transformers(folder, tokens))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", CASES)
def test_closed_text_is_the_base_and_open_text_is_not(base, kind, variant):
    folder = base(kind)
    model = hosted(folder, variant, noise=NOISE, **VARIANTS[variant])
    tokens = some_tokens(folder.spec, 2, 20)
    expected = of_transformers(folder, tokens)
    ungated = model.logits(tokens)
    assert torch.equal(model.logits(tokens, path="base"), expected)
    preserved = model.hidden_states(tokens, path="preserved")
    assert torch.equal(preserved.x, model.hidden_states(tokens, path="base").x)
    assert not torch.equal(model.hidden_states(tokens).x, preserved.x)
    model.gate = random_gate(model, tokens, opens="never")
    assert torch.equal(model.logits(tokens), expected)
    model.gate = random_gate(model, tokens, opens="always")
    assert torch.equal(model.logits(tokens), ungated)


@pytest.mark.parametrize("kind", CASES)
def test_closed_tokens_before_the_first_open_one_have_the_base_s_logits(base, kind):
    """With experts to 2e-7: they multiply the rows that they happen to get (docs/gate.md)."""
    folder = base(kind)
    model = hosted(folder, noise=0.1, **OWN)
    positions, documents = packed([9, 15], [4, 20])
    tokens = some_tokens(folder.spec, 2, 24)
    of_base = model.logits(tokens, positions, documents, path="base")
    model.gate = random_gate(model, tokens, opens="sometimes")
    hidden = model.hidden_states(tokens, positions, documents)
    closed = hidden.open_tokens.closed.view(2, 24)
    found = model.logits(tokens, positions, documents)
    assert closed.any() and not closed.all()
    for row in range(2):
        for document in documents.ids[row].unique():
            is_here = documents.ids[row] == document
            prefix = is_here & ((~closed[row] & is_here).cumsum(0) == 0)
            assert torch.allclose(found[row][prefix], of_base[row][prefix], rtol=0, atol=2e-6)
            if folder.spec.family not in ("deepseek_v3", "qwen3_moe", "qwen3_next"):
                assert torch.equal(found[row][prefix], of_base[row][prefix])


@pytest.mark.parametrize("variant", ["adapt", "lora"])
@pytest.mark.parametrize("kind", CASES)
def test_every_added_tensor_trains_recomputed_or_not(base, kind, variant):
    folder = base(kind)
    tokens, targets = some_batch(folder.spec, 2, 20)
    found = []
    for checkpointing in ("none", "all"):
        changes = {"activation_checkpointing": checkpointing, **VARIANTS[variant]}
        model = hosted(folder, variant, noise=NOISE, **changes)
        model.train()
        model(tokens, targets).total.backward()
        found.append(trained_gradients(model))
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad != is_base(name)
    plain, recomputed = found
    for name, gradient in plain.items():
        assert gradient.any(), name
        assert torch.equal(recomputed[name], gradient), name
    structure = folder.spec.structure
    layer = structure.layers[1]
    for name in layer.linear_maps:
        assert f"layers.1.adapter.{name}.a" in plain
    for name in layer.norms:
        assert f"layers.1.own.{name}.weight" in plain
    for name in structure.last_norms:
        assert f"own.{name}.weight" in plain
    assert {"own_input.rows.weight", "output.own_rows"} <= plain.keys()
    assert not any(".own." in name or ".adapter." in name for name in plain if "layers.0." in name)


@FULL
def test_gradients_of_own_weights_are_those_of_differences(base):
    """By the derivative along the gradient itself; logits are in fp32."""
    folder = base("llama")
    model = hosted(folder, noise=NOISE, dtype=torch.float64, **OWN)
    tokens, targets = some_batch(folder.spec, 2, 20)
    model(tokens, targets).total.backward()
    gradients = trained_gradients(model)
    parameters = dict(model.named_parameters())
    for name in (
        "layers.1.adapter.self_attn.q_proj.b",
        "layers.2.own.input_layernorm.weight",
        "own.model.norm.weight",
        "own_input.rows.weight",
        "output.own_rows",
    ):
        gradient = gradients[name]
        step = 1e-2 / gradient.norm()
        with torch.no_grad():
            parameters[name].add_(step * gradient)
            above = model(tokens, targets).total
            parameters[name].sub_(2 * step * gradient)
            below = model(tokens, targets).total
            parameters[name].add_(step * gradient)
        found = (above - below) / (2 * step)
        torch.testing.assert_close(found, gradient.square().sum(), rtol=2e-2, atol=0, msg=name)


def test_lora_alone_is_what_its_factors_say(base):
    """W + s B A in place of W, from the first layer on, without a gate, rows and gains."""
    folder = base("gpt2")
    model = hosted(folder, "lora", noise=NOISE, alpha=3.0)
    tokens = some_tokens(folder.spec, 2, 20)
    found = model.logits(tokens)
    fused = by_transformers(folder)
    with torch.no_grad():
        for index, layer in enumerate(folder.spec.structure.layers):
            for name in layer.linear_maps:
                adapter = model.layers[index].adapter.get_submodule(name)
                of_base = fused.get_submodule(f"{folder.spec.structure.layer_name(layer)}.{name}")
                of_base.weight += adapter.scale * (adapter.b @ adapter.a).T
        expected = fused(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_map_that_the_base_no_longer_calls_is_refused_by_name(base, monkeypatch):
    folder = base("llama")
    model = hosted(folder, noise=NOISE, **OWN)
    mlp = model.base.get_submodule("model.layers.1.mlp")
    monkeypatch.setattr(mlp, "forward", lambda x: x)
    with pytest.raises(BaseModelError, match=r"layer 1: mlp\.down_proj has open weights"):
        model.logits(some_tokens(folder.spec, 1, 8))
