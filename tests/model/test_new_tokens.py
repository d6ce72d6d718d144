"""The rows of an extended vocabulary: the base beside them is exact, and loss and gradients are
autograd's own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pipeline.model.output as output
from pipeline.methods.registry import method_for
from pipeline.methods.scale import upscale
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.new_tokens import NewTokens
from pipeline.parallel.cross_entropy import LogitColumns
from pipeline.parallel.topology import SINGLE, TensorParallel
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
    unwidened,
)

NEW = NewTokens(
    [[3], [5, 7], [5, 7, 96], [0, 1, 2, 3], [8, 8]]
)  # 5: divides over no number of ranks here


def extended(base: BaseFolder) -> BaseFolder:
    return replace(base, spec=replace(base.spec, new_tokens=len(NEW)), new_tokens=NEW)


def model_of(base: BaseFolder, method: str, folder: Path, *, noise: float = 0.1) -> Decoder:
    """`base` with new rows before the first step of `method`, or shaken by `noise`."""
    settings = METHODS[method]
    if settings.name == "scale" and not (folder / method).exists():
        upscale(
            settings, replace(base, spec=replace(base.spec, new_tokens=0)), folder / method, SEED
        )
    made = method_for(settings, folder / method, SEED)
    model = made.build(base.spec, SINGLE, "none")
    made.load(model, base, SINGLE)
    shake(model, noise)
    return model


def batch_with_new_tokens(model: Decoder) -> tuple[Tensor, Tensor]:
    spec = replace(model.spec, vocab_size=model.spec.vocab_size + model.spec.new_tokens)
    tokens, targets = some_batch(spec, 2, 24)
    tokens[0, 2:7] = targets[1, 4:9] = torch.arange(97, 102)
    return tokens, targets


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *itertools.product(METHODS, ("llama", "llama tied", "neox")),
        ("adapt", "qwen3_moe"),
        ("freeze", "qwen3_moe"),
    ],
)
def test_before_the_first_step_the_old_columns_are_the_bases(base, name, method, tmp_path):
    model = model_of(extended(base(name)), method, tmp_path, noise=0.0)
    tokens = some_tokens(base(name).spec, 2, 24)
    expected = unwidened(base(name)).logits(tokens)
    assert torch.equal(model.logits(tokens)[..., :97], expected)
    shake(model, 0.1)
    assert not torch.equal(model.logits(tokens)[..., :97], expected), (
        "nothing that trains reaches the old columns"
    )
    if model.keeps_base:
        assert torch.equal(model.logits(tokens, path="base")[..., :97], expected)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, "llama") for method in ("preserve", "adapt", "route", "fft", "lora")),
        ("adapt", "neox tied"),
        ("route", "gemma2"),
        ("adapt", "qwen3_moe"),
    ],
)
def test_loss_and_gradients_equal_plain_cross_entropy(base, name, method, tmp_path, monkeypatch):
    model = model_of(extended(base(name)), method, tmp_path)
    tokens, targets = batch_with_new_tokens(model)
    if method == "route":
        balance_router(model, tokens)
    logits = plain_logits(model, model.hidden_states(tokens))
    expected_nll = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
    expected_nll.sum().backward()
    expected = trained_gradients(model)
    for rows in (7, 1000):
        model.zero_grad()
        monkeypatch.setattr(output, "CHUNK_ELEMENTS", rows * 102)
        losses = model(tokens, targets)
        assert_near(losses.nll, expected_nll, PARITY)
        losses.total.backward()
        for parameter, gradient in trained_gradients(model).items():
            assert expected[parameter].any(), f"{parameter} is not reached"
            assert_near(gradient, expected[parameter], PARITY, parameter)
    with torch.no_grad():
        chosen = model(tokens, logits.argmax(dim=1).view(tokens.shape)).is_greedy_choice
    assert chosen.all()


@pytest.mark.parametrize("method", ["adapt", "fft"])
def test_the_base_gives_new_tokens_no_probability(base, method, tmp_path):
    model = model_of(extended(base("llama")), method, tmp_path)
    if not model.keeps_base:
        model.add_reference()
        method_for(METHODS[method], tmp_path, SEED).load(
            model.reference, extended(base("llama")), SINGLE
        )
    tokens, targets = some_batch(base("llama").spec, 2, 24)
    p = unwidened(base("llama")).logits(tokens[:1]).log_softmax(dim=-1)
    q = (
        plain_logits(model, model.hidden_states(tokens))
        .log_softmax(dim=-1)
        .view(2, 24, -1)[:1, :, :97]
    )
    expected = (p.exp() * (p - q)).sum(dim=-1).masked_fill(targets[:1] == -100, 0)
    expected.sum().backward()
    gradients = trained_gradients(model)
    model.zero_grad()
    losses = model(
        tokens,
        targets.masked_fill(torch.tensor([[False], [True]]), -100),
        kl_sequences=1,
        reference_sequences=1,
    )
    assert_near(losses.kl[:1], expected, PARITY, scale=p)
    losses.total.backward()
    for name, gradient in trained_gradients(model).items():
        assert_near(gradient, gradients[name], PARITY, name)


def test_initial_rows():
    rows = torch.arange(97.0).unsqueeze(1) * torch.tensor([1.0, 10.0])
    assert torch.equal(NEW.initial_rows(rows)[:, 0], torch.tensor([3.0, 6.0, 36.0, 1.5, 8.0]))
    weighted = replace(NEW, initial="last-weighted").initial_rows(rows)[:, 1]
    torch.testing.assert_close(
        weighted, 10 * torch.tensor([3, (5 + 14) / 3, (5 + 14 + 288) / 6, 2.0, 8])
    )
    assert torch.equal(replace(NEW, initial="zero").initial_rows(rows), torch.zeros(5, 2))


def test_new_rows_of_a_widened_base_start_as_the_mean_of_both_streams(base, tmp_path):
    model = model_of(extended(base("llama")), "preserve", tmp_path, noise=0.0)
    embedding, width = model.embedding, 32
    old = torch.cat([embedding.base.weight, embedding.expansion.weight], dim=1)
    torch.testing.assert_close(embedding.new_rows.weight[1], (old[5] + old[7]) / 2)
    assert torch.equal(model.output.new_rows[:, width:], torch.zeros(5, 12))
    torch.testing.assert_close(model.output.new_rows[0, :width], model.output.base[3])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_every_token_has_a_column_of_its_own_on_the_rank_that_holds_its_row(
    vocab_size: int, new: int, tp_size: int
):
    tokens = torch.arange(vocab_size + new)
    owners = []
    for rank in range(tp_size):
        tp = TensorParallel(rank=rank, size=tp_size) if tp_size > 1 else SINGLE
        columns = LogitColumns(vocab_size, new, tp)
        of_rank = columns.range
        places = columns.columns_of(tokens)
        here = (places >= of_rank["first"]) & (places < of_rank["first"] + columns.width)
        old = here[:vocab_size].nonzero().flatten()
        assert torch.equal(old, tokens[columns.first : columns.first + columns.base_count])
        assert torch.equal(places[old] - of_rank["first"], old - columns.first)
        owners.append(here)
        assert places.unique().numel() == len(tokens) and places.max() < of_rank["vocab_size"]
    assert torch.equal(torch.stack(owners).sum(dim=0), torch.ones(len(tokens), dtype=torch.int64))
    assert columns.columns_of(torch.tensor([-100])).item() == -100
