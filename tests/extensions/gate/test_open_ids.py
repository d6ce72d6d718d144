"""Ids that a gate opens whatever their score: which they are, and what stays exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pipeline.extensions.gate.open_ids import choose_open_ids
from pipeline.extensions.gate.windows import NO_KIND, Windows
from tests.extensions.gate.gates import random_gate
from tests.extensions.gate.test_catching_up import gated, prompts
from tests.extensions.gate.test_exactness import batch_of, trained


def counts(*of_ids: int) -> np.ndarray:
    return np.array(of_ids, dtype=np.int64)


def test_open_are_ids_that_new_text_has_often_and_old_text_hardly_ever():
    new = counts(5000, 20, 19, 300, 400, 0, 200)
    old = counts(50_000, 0, 0, 1, 0, 100_000, 60)
    found = choose_open_ids(new, old, min_count=20, never=frozenset({4, 1000}))
    assert found.ids == (1, 3)
    assert found.of_new == 320 / 5939
    assert found.of_old == 1 / 150_061


def test_little_old_text_and_much_new_text_open_no_id_by_chance():
    new = counts(10**6, 20, 10**5)
    assert choose_open_ids(new, counts(300, 0, 0), min_count=20, never=frozenset()).ids == (2,)
    assert choose_open_ids(new, counts(3, 0, 0), min_count=20, never=frozenset()).ids == ()
    none = counts(0, 0, 0)
    assert choose_open_ids(new, none, min_count=20, never=frozenset()).ids == ()
    assert choose_open_ids(none, new, min_count=1, never=frozenset()).ids == ()


def test_own_ids_are_those_of_self_generated_text_that_does_not_look_new():
    """Replay is left out: all of its corpora is counted as old text anyway."""
    # Self-generated text with padding, replay, and new text.
    is_self_generated = torch.tensor([[True, True, True], [False] * 3, [False] * 3])
    is_new = torch.tensor([[False] * 3, [False] * 3, [True] * 3])
    present = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    tokens = torch.arange(9).view(3, 3)
    windows = Windows(
        tokens,
        tokens,
        tokens,
        tokens,
        is_new,
        is_self_generated,
        present,
        tokens.clone().fill_(NO_KIND),
    )
    looks_new = torch.tensor([[True, False, False], [False] * 3, [False] * 3])
    assert windows.self_generated_ids(looks_new).tolist() == [1]
    assert windows.self_generated_ids(torch.zeros_like(looks_new)).tolist() == [0, 1]


@torch.no_grad()
@pytest.mark.parametrize("variant", ["preserve", "adapt", "route"])
def test_text_without_the_ids_is_the_bases_and_the_ids_are_open(variant, base):
    model = trained(base, "llama tied", variant)
    batch = batch_of(model)
    tokens = batch[0]
    # The ids of one token in each row, behind the first.
    ids = tuple(sorted({int(tokens[0, 12]), int(tokens[1, 20])}))
    has_id = torch.isin(tokens, torch.tensor(ids))
    assert has_id.any() and not has_id.all()
    of_base = model.logits(*batch, path="base")
    model.gate = random_gate(model, tokens, batch[2], opens="always")
    opened = model.logits(*batch)

    gate = random_gate(model, tokens, batch[2], opens="never")
    model.gate = replace(gate, open_ids=ids)
    assert torch.equal(model.gate.opens_id(tokens), has_id)
    found = model.logits(*batch)
    before = has_id.cumsum(dim=1) == 0
    assert before.any() and torch.equal(found[before], of_base[before])
    if variant != "adapt":  # whose open tokens read what closed ones left in attention
        assert torch.equal(found, torch.where(has_id.unsqueeze(-1), opened, of_base))
    assert ((found - of_base).abs().amax(-1)[has_id] > 1e-3).all()

    without = torch.where(has_id, (tokens + 1) % model.spec.vocab_size, tokens)
    while torch.isin(without, torch.tensor(ids)).any():
        without = torch.where(
            torch.isin(without, torch.tensor(ids)), (without + 1) % model.spec.vocab_size, without
        )
    batch = (without, *batch[1:])
    assert torch.equal(model.logits(*batch), model.logits(*batch, path="base"))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("open ids", "the gate opens some tokens by their ids"),
        ("new pieces", "the gate opens the tokens of an extended vocabulary by their ids"),
        ("adapt", None),
    ],
)
def test_an_embedding_does_not_name_the_ids_that_a_gate_opens(name, reason):
    model = gated(name, bias=-30.0)
    tokens = prompts()[0]
    tokens[:, 3] = 5  # is among the ids of "open ids"
    tokens[:, 4] = 505  # is new in "new pieces"
    embedded = model.get_input_embeddings()(tokens)
    if reason is None:
        assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens).logits)
        return
    by_id = model.opens_by_id(tokens, None)
    assert by_id.any() and not by_id.all()
    for call in (model, model.base_model, partial(model.generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match="give input_ids") as caught:
            call(inputs_embeds=embedded)
        assert str(caught.value).startswith(f"give input_ids: {reason}, which")
