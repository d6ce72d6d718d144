"""The collectives on real ranks: what they sum, forward and backward, and what a graph they leave."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipeline.parallel.collectives import counted_once, enter_region, leave_region, sum_gradient
from pipeline.parallel.cross_entropy import nll_and_logit_gradient_
from pipeline.parallel.embedding import VOCABULARY, VocabularyParallelEmbedding
from pipeline.parallel.linear import ColumnParallelLinear, RowParallelLinear
from pipeline.parallel.parameter import full_shape_of, partition_of, sharded_parameter
from pipeline.parallel.sharding import Partition, merge, split
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups
from pipeline.scale.router import preserved_tokens
from tests.distributed import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def group_of_all():
    return ProcessGroups(Layout(dist.get_world_size(), dist.get_world_size())).tensor_parallel


def leaf(*values):
    return torch.tensor([float(value) for value in values], requires_grad=True)


def enter_and_leave():
    tp = group_of_all()
    number = tp.rank + 1
    x, x_up, frozen = leaf(1, 2), leaf(3, 4, 5), torch.ones(2)
    entered = enter_region(tp, x, x_up, frozen, None)
    sum(number * tensor.sum() for tensor in entered[:2]).backward()
    partial, partial_up, constant = leaf(number), leaf(number, 2 * number), torch.full((2,), float(number))
    left = leave_region(tp, partial, None, partial_up, constant)
    (left[0].sum() + 10 * left[2].sum()).backward()
    return {
        "entered": [tensor.detach() for tensor in entered[:2]],
        "entered gradients": [x.grad, x_up.grad],
        "frozen stays out": entered[2] is frozen and entered[3] is None,
        "left": [left[0].detach(), left[2].detach(), left[3]],
        "left gradients": [partial.grad, partial_up.grad],
        "constants get no graph": not left[3].requires_grad and left[1] is None,
    }


def test_regions_sum_gradients_on_entry_and_results_on_leaving():
    for seen in run_ranks(enter_and_leave, 3):
        assert [tensor.tolist() for tensor in seen["entered"]] == [[1, 2], [3, 4, 5]]
        assert [gradient.tolist() for gradient in seen["entered gradients"]] == [[6, 6], [6, 6, 6]]
        assert seen["frozen stays out"]
        assert [tensor.tolist() for tensor in seen["left"]] == [[6], [6, 12], [6, 6]]
        assert [gradient.tolist() for gradient in seen["left gradients"]] == [[1], [10, 10]]
        assert seen["constants get no graph"]


def test_on_one_rank_nothing_is_wrapped():
    x, x_up = leaf(1), leaf(2)
    assert enter_region(SINGLE, x, None, x_up) == (x, None, x_up)
    assert leave_region(SINGLE, x, x_up) == (x, x_up)
    assert counted_once(x, SINGLE) is x


def sums_and_counts():
    tp = group_of_all()
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


def fill(module, tp):
    """The same whole weights on every rank, each keeping its shard."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            full = torch.randn(full_shape_of(parameter), generator=generator)
            parameter.copy_(split(full, partition_of(parameter), tp.rank, tp.size))
    return module


def two_layers(tp):
    """An embedding, then a column- and a row-parallel map around a non-linearity, between the two collectives."""
    embedding = fill(VocabularyParallelEmbedding(7, 6, tp=tp), tp)
    column = fill(ColumnParallelLinear(6, 8, bias=True, units=4, tp=tp), tp)
    row = fill(RowParallelLinear(8, 6, bias=True, units=4, tp=tp), tp)
    (x,) = leave_region(tp, embedding(torch.tensor([[0, 3, 6, 6]])))
    (entered,) = enter_region(tp, x)
    (y,) = leave_region(tp, row(torch.tanh(column(entered))))
    y.square().sum().backward()
    modules = {"embedding": embedding, "column": column, "row": row}
    named = [(f"{name}.{part}", p) for name, module in modules.items() for part, p in module.named_parameters()]
    return y.detach(), {name: (p.grad, partition_of(p), full_shape_of(p)) for name, p in named}


def two_layers_of_rank():
    return two_layers(group_of_all())


@pytest.mark.parametrize("tp_size", [2, 4])
def test_parallel_layers_equal_whole_ones(tp_size):
    expected, expected_gradients = two_layers(SINGLE)
    ranks = run_ranks(two_layers_of_rank, tp_size)
    for found, _ in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, (gradient, partition, full_shape) in expected_gradients.items():
        shards = [gradients[name][0] for _, gradients in ranks]
        size = 0 if partition.dim is None else full_shape[partition.dim]
        torch.testing.assert_close(merge(shards, partition, size), gradient, rtol=1e-5, atol=1e-4)


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
    nll, gradient = nll_and_logit_gradient_(padded, targets, first=first, vocab_size=vocab_size, tp=tp)
    return full, targets, nll, gradient, preserved


def loss_and_choice_of_rank(vocab_size):
    return loss_and_choice(group_of_all(), vocab_size)[2:]


@pytest.mark.parametrize("vocab_size", [7, 8, 5])
def test_cross_entropy_and_router_over_a_split_vocabulary(vocab_size):
    """Five entries over four ranks leave the last rank padding alone."""
    full, targets, nll, gradient, preserved = loss_and_choice(SINGLE, vocab_size)
    logits = full.clone().requires_grad_()
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    plain.sum().backward()
    torch.testing.assert_close(nll, plain.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-6)
    assert preserved.any()
    assert not preserved.all()
    for tp_size in (2, 4):
        ranks = run_ranks(loss_and_choice_of_rank, tp_size, vocab_size)
        for found, _, choice in ranks:
            torch.testing.assert_close(found, nll, rtol=1e-5, atol=1e-5)
            assert torch.equal(choice, preserved)
        whole = merge([part for _, part, _ in ranks], Partition(dim=1, padded=True), vocab_size)
        torch.testing.assert_close(whole, gradient, rtol=1e-5, atol=1e-6)


def test_a_vocabulary_smaller_than_the_padding_is_still_whole():
    parameter = sharded_parameter((2, 3), VOCABULARY, SINGLE)
    assert parameter.shape == (2, 3)
