"""The collectives on real ranks: what they sum, forward and backward."""

from __future__ import annotations

import pytest
import torch

from pipeline.parallel.collectives import counted_once, leave_region, sum_gradient
from pipeline.parallel.cross_entropy import greedy_choices_, nll_and_logit_gradient_
from pipeline.parallel.sharding import VOCABULARY, Partition, merge, split
from pipeline.parallel.topology import SINGLE
from pipeline.scale.router import preserved_tokens
from tests.distributed import all_ranks, run_ranks
from tests.tolerances import assert_near, rounding


def leaf(*values):
    return torch.tensor([float(value) for value in values], requires_grad=True)


def sums_and_counts():
    tp = all_ranks()
    shared, bias = leaf(1, 1), leaf(5, 7)
    upstream = torch.full((2,), float(tp.rank + 1))
    untouched = upstream.clone()
    summed = sum_gradient(shared, tp.group)
    torch.autograd.backward(summed, upstream)
    (total,) = leave_region(tp, counted_once(bias, tp))
    total.sum().backward()
    return shared.grad, torch.equal(upstream, untouched), total.detach(), bias.grad


def test_a_shared_parameters_gradient_is_summed_and_a_whole_term_counted_once():
    for gradient, untouched, total, bias_gradient in run_ranks(sums_and_counts, 2):
        assert gradient.tolist() == [3, 3]
        assert untouched, "another branch's gradient was overwritten"
        assert total.tolist() == [5, 7]
        assert bias_gradient.tolist() == [1, 1]


def loss_and_choice(tp, vocab_size):
    generator = torch.Generator().manual_seed(0)
    full, other = 30 * torch.randn(2, 5, vocab_size, generator=generator)
    targets = torch.tensor([0, vocab_size - 1, -100, 2, 1])
    by_column = Partition(dim=1, padded=True)
    logits, z_p = (split(tensor, by_column, tp.rank, tp.size) for tensor in (full, other))
    first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
    columns = max(0, min(stop, vocab_size) - first)
    preserved = preserved_tokens(z_p[:, :columns], logits[:, :columns], 0.05, tp)
    padded = logits.clone()
    padded[:, columns:] = 1e6  # whatever padding holds must not count
    nll, gradient = nll_and_logit_gradient_(
        padded, targets, first=first, vocab_size=vocab_size, tp=tp
    )
    return full, targets, nll, gradient, preserved


def loss_and_choice_of_rank(vocab_size):
    return loss_and_choice(all_ranks(), vocab_size)[2:]


@pytest.mark.parametrize("vocab_size", [7, 8, 5])
def test_cross_entropy_and_router_over_a_split_vocabulary(vocab_size):
    """Five entries over four ranks leave the last rank padding alone."""
    full, targets, nll, gradient, preserved = loss_and_choice(SINGLE, vocab_size)
    logits = full.clone().requires_grad_()
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    plain.sum().backward()
    bound = rounding(vocab_size, 3)
    assert_near(nll, plain.detach(), bound)
    assert_near(gradient, logits.grad, bound)
    assert preserved.any()
    assert not preserved.all()
    for tp_size in (2, 4):
        ranks = run_ranks(loss_and_choice_of_rank, tp_size, vocab_size)
        for found, _, choice in ranks:
            assert_near(found, nll, bound)
            assert torch.equal(choice, preserved)
        whole = merge([part for _, part, _ in ranks], Partition(dim=1, padded=True), vocab_size)
        assert_near(whole, gradient, bound)


def greedy_choices(tp, vocab_size):
    """Logits of few values, so that often several are the largest."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(3, (300, vocab_size), generator=generator).float()
    logits = split(full, Partition(dim=1, padded=True), tp.rank, tp.size).clone()
    first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
    logits[:, max(0, min(stop, vocab_size) - first) :] = 1e6  # padding
    return full, greedy_choices_(logits, first=first, vocab_size=vocab_size, tp=tp)


def greedy_choices_of_rank(vocab_size):
    return greedy_choices(all_ranks(), vocab_size)[1]


def test_greedy_decoding_takes_the_first_of_the_largest_on_any_rank():
    full, found = greedy_choices(SINGLE, 7)
    largest = full == full.amax(dim=1, keepdim=True)
    assert (largest.sum(dim=1) > 1).sum() > 100
    assert torch.equal(found, largest.float().argmax(dim=1))
    for tp_size in (2, 4):
        for choices in run_ranks(greedy_choices_of_rank, tp_size, 7):
            assert torch.equal(choices, found)
