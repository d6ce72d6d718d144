"""The layout of ranks for any world size, and the process groups that real ranks create."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import LayoutError
from pipeline.parallel.topology import Layout, ProcessGroups, TensorParallel, check_sequence_length
from tests.distributed import run_ranks

layouts = st.builds(
    lambda dp_size, tp_size: Layout(dp_size * tp_size, tp_size),
    st.integers(1, 8),
    st.integers(1, 8),
)


@given(layouts)
def test_groups_hold_the_right_ranks(layout):
    ranks = list(range(layout.world_size))
    for groups in (layout.tp_groups(), layout.dp_groups()):
        assert sorted(rank for group in groups for rank in group) == ranks
    for group in layout.tp_groups():
        assert group == list(range(group[0], group[0] + layout.tp_size)), "neighbours share a node"
        assert len({layout.dp_rank(rank) for rank in group}) == 1
    for group in layout.dp_groups():
        assert len({layout.tp_rank(rank) for rank in group}) == 1
        assert len(group) == layout.dp_size


def seen_by_a_rank(tp_size):
    """Sums of the rank numbers over each group of a rank, and what DeepSpeed reads."""
    groups = ProcessGroups(Layout(dist.get_world_size(), tp_size))
    tp = groups.tensor_parallel

    def total(group):
        number = torch.tensor([2 ** dist.get_rank()])
        dist.all_reduce(number, group=group)
        return int(number)

    deepspeed_view = (
        groups.get_model_parallel_rank(),
        groups.get_tensor_model_parallel_world_size(),
        groups.get_tensor_model_parallel_src_rank(),
        groups.get_data_parallel_rank(),
        groups.get_data_parallel_world_size(),
        groups.get_data_parallel_group_ranks(),
    )
    replicas = {size: total(tp.replica_group(size)) for size in (2, 4) if size <= tp_size}
    return total(tp.group), total(groups.get_data_parallel_group()), replicas, deepspeed_view


def groups_made_by_a_rank(tp_size):
    made, new_group = [], dist.new_group

    def watched(ranks, **options):
        made.append(ranks)
        return new_group(ranks, **options)

    dist.new_group = watched
    ProcessGroups(Layout(dist.get_world_size(), tp_size))
    dist.barrier()  # a rank that ends early would break the others' connections
    return made


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_rank_makes_its_own_groups_only(tp_size):
    """Of a thousand ranks too: all groups of one, made by every rank, would take minutes under
    NCCL."""
    for rank, made in enumerate(run_ranks(groups_made_by_a_rank, 4, tp_size)):
        assert len(made) == (3 if tp_size == 4 else 2) and all(rank in ranks for ranks in made)


def mask(*ranks):
    return sum(2**rank for rank in ranks)


def test_real_groups_hold_the_ranks_that_the_layout_says():
    first, second, third, fourth = run_ranks(seen_by_a_rank, 4, 2)
    assert first == (mask(0, 1), mask(0, 2), {2: mask(0, 1)}, (0, 2, 0, 0, 2, [0, 2]))
    assert second == (mask(0, 1), mask(1, 3), {2: mask(0, 1)}, (1, 2, 0, 0, 2, [1, 3]))
    assert third == (mask(2, 3), mask(0, 2), {2: mask(2, 3)}, (0, 2, 2, 1, 2, [0, 2]))
    assert fourth == (mask(2, 3), mask(1, 3), {2: mask(2, 3)}, (1, 2, 2, 1, 2, [1, 3]))
    whole = run_ranks(seen_by_a_rank, 4, 4)
    assert [rank[2] for rank in whole] == [{2: mask(0, 1), 4: 15}] * 2 + [
        {2: mask(2, 3), 4: 15}
    ] * 2


def test_a_world_or_a_sequence_that_does_not_divide_over_the_ranks_is_refused():
    with pytest.raises(
        LayoutError, match="tp_size: expected a divisor of the number of ranks, 6, found 4"
    ):
        Layout(6, 4)
    split, whole = (
        TensorParallel(rank=0, size=4, sequence_parallel=choice) for choice in (True, False)
    )
    check_sequence_length(24, split)
    check_sequence_length(26, whole)
    with pytest.raises(
        LayoutError, match=r"data.sequence_length: .* multiple of parallel.tp_size 4, found 26"
    ):
        check_sequence_length(26, split)
