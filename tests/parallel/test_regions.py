"""Entering and leaving regions on real ranks: what travels, forward and backward, and what a graph
it leaves."""

from __future__ import annotations

import pytest
import torch

from pipeline.parallel.collectives import enter_region, leave_region
from tests.distributed import all_ranks, run_ranks


def leaf(*values):
    return torch.tensor([float(value) for value in values], requires_grad=True)


def enter_and_leave():
    tp = all_ranks()
    number = tp.rank + 1
    x, x_up, frozen = leaf(1, 2), leaf(3, 4, 5), torch.ones(2)
    entered = enter_region(tp, x, x_up, frozen, None)
    sum(number * tensor.sum() for tensor in entered[:2]).backward()
    partial, partial_up, constant = (
        leaf(number),
        leaf(number, 2 * number),
        torch.full((2,), float(number)),
    )
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


def some_streams(seed):
    """Two streams over two sequences of six positions: random numbers to send, and to weigh
    gradients with."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 6, width, generator=generator) for width in (3, 2)]


def enter_and_leave_with_positions_split():
    tp = all_ranks(sequence_parallel=True)
    of_rank = [tensor.chunk(tp.size, dim=1)[tp.rank].clone() for tensor in some_streams(0)]
    x, frozen = of_rank[0].requires_grad_(), of_rank[1]
    entered = enter_region(tp, x, None, frozen)
    (entered[0] * some_streams(1 + tp.rank)[0]).sum().backward()
    partial, constant = some_streams(10 + tp.rank)
    left = leave_region(tp, partial.requires_grad_(), None, constant)
    (left[0] * some_streams(20)[0].chunk(tp.size, dim=1)[tp.rank]).sum().backward()
    return {
        "entered": (entered[0].detach(), entered[2]),
        "entered gradient": x.grad,
        "left": (left[0].detach(), left[2]),
        "left gradient": partial.grad,
        "constants get no graph": not entered[2].requires_grad and not left[2].requires_grad,
        "None stays None": entered[1] is None and left[1] is None,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_positions_are_gathered_on_entry_and_their_sums_scattered_on_leaving(size):
    """Forward as backward: what is gathered one way is summed and scattered the other."""
    ranks = run_ranks(enter_and_leave_with_positions_split, size)
    gradient = sum(some_streams(1 + rank)[0] for rank in range(size))
    partials = [some_streams(10 + rank) for rank in range(size)]
    sums = [sum(of_ranks) for of_ranks in zip(*partials, strict=True)]
    for rank, seen in enumerate(ranks):
        for found, expected in zip(seen["entered"], some_streams(0), strict=True):
            assert torch.equal(found, expected)
        torch.testing.assert_close(seen["entered gradient"], gradient.chunk(size, dim=1)[rank])
        for found, expected in zip(seen["left"], sums, strict=True):
            torch.testing.assert_close(found, expected.chunk(size, dim=1)[rank])
        assert torch.equal(seen["left gradient"], some_streams(20)[0])
        assert seen["constants get no graph"]
        assert seen["None stays None"]
