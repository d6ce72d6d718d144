"""Our decoder computes what transformers computes, on every kind of base, and packed documents as
if alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.model.from_hf import open_base
from tests.bases import CONFIGS, MIXTURES, STORIES, reference
from tests.tolerances import PARITY, assert_near, assert_parity
from tests.widened import packed, scale_settings, some_tokens, unwidened, widened


@torch.no_grad()
def assert_parity_of(base, tokens):
    expected = reference(base.path)(tokens).logits
    assert expected.std() > 0.5, "logits too small to distinguish two models"
    assert_parity(unwidened(base).logits(tokens), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(base, name):
    for length in (1, 37, 128):
        assert_parity_of(base(name), some_tokens(base(name).spec, 2, length))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_twice_the_epsilon_of_the_norms_is_seen(base, name):
    """The bound is small enough to find the least of faults: it moves gemma2's logits by 2.4e-5,
    others' by more."""
    right = base(name)
    wrong = replace(right, spec=replace(right.spec, norm_eps=2 * right.spec.norm_eps))
    with pytest.raises(AssertionError, match="logits: off by"):
        assert_parity_of(wrong, some_tokens(right.spec, 2, 128))


def test_a_pretrained_model_equals_transformers_and_predicts_english():
    base = open_base(STORIES)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    from transformers import AutoTokenizer

    tokens = torch.tensor([AutoTokenizer.from_pretrained(STORIES)(text).input_ids])
    assert_parity_of(base, tokens)
    _, nll, *_ = unwidened(base)(tokens[:, :-1], tokens[:, 1:])
    assert nll.mean().exp() < 4, "perplexity of a story by the model's own domain"


ROUNDED_OTHERWISE = {"gemma2": "its soft cap of logits is in fp32"}


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(MIXTURES)))
def test_sixteen_bits_equal_transformers(base, name):
    """To the bit: an export whose gate is shut then is the base. In mixtures the router's rounding
    chooses other experts."""
    tokens = some_tokens(base(name).spec, 2, 37)
    expected = reference(base(name).path, torch.bfloat16)(tokens).logits.float()
    found = unwidened(base(name)).bfloat16().logits(tokens)
    if name in ROUNDED_OTHERWISE:
        epsilon = torch.finfo(torch.bfloat16).eps
        assert_near(found, expected, 2 * epsilon)
    else:
        assert torch.equal(found, expected)


LENGTHS = (5, 16, 9)


def models(base):
    yield unwidened(base)
    yield widened(
        base, scale_settings("route", collaborative_modules="both", router_threshold=0.9), noise=0.1
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_documents_alone(base, name):
    tokens = some_tokens(base(name).spec, 1, sum(LENGTHS))
    positions, documents = packed(LENGTHS)
    for model in models(base(name)):
        together = model.logits(tokens, positions, documents)
        alone = torch.cat(
            [model.logits(document) for document in tokens.split(LENGTHS, dim=1)], dim=1
        )
        assert_near(together, alone, PARITY)
        crossing = model.logits(tokens)
        assert (crossing - alone)[:, LENGTHS[0] :].abs().max() > 0.1, "the mask hides nothing"
