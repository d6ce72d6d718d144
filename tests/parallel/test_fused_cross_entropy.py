"""The losses in two passes against those by single operations, on one rank and on several."""

from __future__ import annotations

import pytest
import torch

from pipeline.parallel import fused_cross_entropy
from pipeline.parallel.cross_entropy import (
    IGNORED,
    kl_and_logit_gradient_,
    nll_and_logit_gradient_,
)
from pipeline.parallel.fused_cross_entropy import LogitParts
from pipeline.parallel.sharding import VOCABULARY, Partition, merge, split
from pipeline.parallel.topology import SINGLE
from tests.distributed import all_ranks, run_ranks
from tests.tolerances import assert_near, rounding

BY_COLUMN = Partition(dim=1, padded=True)
TARGETS = [0, 36, IGNORED, 2, 1, 18]
VOCAB_SIZE = 37
"""Padded over two ranks, and over four."""


def uncompiled(monkeypatch):
    """The passes as they are written, without a compiler."""
    monkeypatch.setattr(fused_cross_entropy, "_compiled", lambda function: function)


def some_logits(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    of_x, of_x_up, reference = 9 * torch.randn(3, len(TARGETS), VOCAB_SIZE, generator=generator)
    return of_x.to(dtype), of_x_up.to(dtype), reference


def both_losses(tp, dtype=torch.float32):
    """The nll and KL of a rank's columns, with their gradients."""
    first, _ = VOCABULARY.bounds(VOCAB_SIZE, tp.rank, tp.size)
    of_x, of_x_up, reference = (
        split(tensor, BY_COLUMN, tp.rank, tp.size).clone() for tensor in some_logits(dtype)
    )
    for tensor in (of_x, of_x_up, reference):
        tensor[:, max(0, VOCAB_SIZE - first) :] = 1e6  # whatever padding holds must not count
    targets = torch.tensor(TARGETS)
    columns = {"first": first, "vocab_size": VOCAB_SIZE, "tp": tp}
    logits = LogitParts(of_x, of_x_up)
    nll = fused_cross_entropy.nll_and_logit_gradient(logits, targets, torch.float32, **columns)
    kl = fused_cross_entropy.kl_and_logit_gradient(
        logits, reference, targets == IGNORED, torch.float32, **columns
    )
    return *nll, *kl


def both_losses_of_rank():
    with pytest.MonkeyPatch.context() as patch:
        uncompiled(patch)
        return both_losses(all_ranks())


def by_operations(dtype=torch.float32):
    of_x, of_x_up, reference = some_logits(dtype)
    targets = torch.tensor(TARGETS)
    columns = {"first": 0, "vocab_size": VOCAB_SIZE, "tp": SINGLE}
    z = of_x.float() + of_x_up
    nll = nll_and_logit_gradient_(z.clone(), targets, **columns)
    kl = kl_and_logit_gradient_(z, reference, targets == IGNORED, **columns)
    return *nll, *kl


def check_equal(found, expected):
    """Each of nll, its gradient, KL, its gradient."""
    for result, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0.1
        assert_near(result, wanted, rounding(VOCAB_SIZE, 3))
        assert not result[TARGETS.index(IGNORED)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_passes_give_the_losses_and_gradients_of_single_operations(dtype, monkeypatch):
    uncompiled(monkeypatch)
    check_equal(both_losses(SINGLE, dtype), by_operations(dtype))


@pytest.mark.full
def test_the_compiled_passes_do_too_for_chunks_of_any_size():
    check_equal(both_losses(SINGLE, torch.bfloat16), by_operations(torch.bfloat16))
    targets = torch.tensor(TARGETS)
    of_x, of_x_up, _ = some_logits()
    expected, _ = nll_and_logit_gradient_(
        of_x + of_x_up, targets, first=0, vocab_size=VOCAB_SIZE, tp=SINGLE
    )
    for rows in (6, 5, 3, 1):
        found, _ = fused_cross_entropy.nll_and_logit_gradient(
            LogitParts(of_x[:rows], of_x_up[:rows]),
            targets[:rows],
            torch.float32,
            first=0,
            vocab_size=VOCAB_SIZE,
            tp=SINGLE,
        )
        assert_near(found, expected[:rows], rounding(VOCAB_SIZE, 3))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_that_share_the_vocabulary_find_the_same(tp_size):
    expected = by_operations()
    ranks = run_ranks(both_losses_of_rank, tp_size)
    for nll, _, kl, _ in ranks:
        assert_near(nll, expected[0], rounding(VOCAB_SIZE, 3))
        assert_near(kl, expected[2], rounding(VOCAB_SIZE, 3))
    for gradient in (1, 3):
        whole = merge([rank[gradient] for rank in ranks], BY_COLUMN, VOCAB_SIZE)
        assert_near(whole, expected[gradient], rounding(VOCAB_SIZE, 3))


def test_equal_logits_have_a_divergence_and_a_gradient_of_exactly_zero(monkeypatch):
    uncompiled(monkeypatch)
    z, _, _ = some_logits()
    kl, gradient = fused_cross_entropy.kl_and_logit_gradient(
        LogitParts(z),
        z.clone(),
        torch.zeros(len(z), dtype=torch.bool),
        torch.float32,
        first=0,
        vocab_size=VOCAB_SIZE,
        tp=SINGLE,
    )
    assert not kl.any()
    assert not gradient.any()


def test_the_gradient_passes_through_soft_capping_and_a_factor(monkeypatch):
    uncompiled(monkeypatch)
    of_x, _, _ = some_logits()
    targets = torch.tensor(TARGETS)
    z = of_x.clone().requires_grad_()
    capped = 5 * torch.tanh(0.5 * z / 5)
    torch.nn.functional.cross_entropy(capped, targets, reduction="sum").backward()
    _, gradient = fused_cross_entropy.nll_and_logit_gradient(
        LogitParts(capped.detach(), softcap=5.0, factor=0.5),
        targets,
        torch.float32,
        first=0,
        vocab_size=VOCAB_SIZE,
        tp=SINGLE,
    )
    assert_near(gradient, z.grad, rounding(VOCAB_SIZE, 3))
