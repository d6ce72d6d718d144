"""Matrices that are divided over ranks: each is computed whole on one of them, at every layout."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.optimizers import divided_matrices
from pipeline.optimizers.divided_matrices import DividedMatrices, _buckets, _matrices_of, _owners
from pipeline.parallel.parameters import OptimizerShard, sharded_parameter
from pipeline.parallel.sharding import REPLICATED, Partition, local_shape, split
from pipeline.parallel.topology import Layout, TensorParallel
from tests.distributed import run_ranks

# Rows, columns and none are split; experts are a stack; two heads are shared by more ranks.
PARAMETERS = [
    ((8, 6), Partition(dim=0, units=8)),
    ((6, 8), Partition(dim=1, units=8)),
    ((5, 3), REPLICATED),
    ((3, 8, 4), Partition(dim=1, units=8)),
    ((2, 4, 8), REPLICATED),
    ((8, 6), Partition(dim=0, units=2)),
    ((1, 7), REPLICATED),
]


def whole_parameters() -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=random) for shape, _ in PARAMETERS]


def turned(matrices: Tensor) -> Tensor:
    """A function that needs whole matrices, and is exact: every element comes from elsewhere."""
    return -2 * matrices.flip(-1, -2)


def divided(layout: Layout, rank: int, zero_stage: int) -> tuple[list[OptimizerShard], Tensor]:
    """What a rank holds of every parameter, and its elements of them in one flat tensor."""
    tp_rank, dp_rank = layout.tp_rank(rank), layout.dp_rank(rank)
    tp = TensorParallel(tp_rank, layout.tp_size)
    held: list[Tensor] = []
    cuts: list[tuple[nn.Parameter, int, int]] = []
    sizes = [prod(local_shape(shape, partition, layout.tp_size)) for shape, partition in PARAMETERS]
    # ZeRO-1 and 2 cut all parameters in a row into equal parts, ZeRO-3 each parameter.
    part = -(-sum(sizes) // layout.dp_size)
    begin = 0
    for whole, (shape, partition), size in zip(whole_parameters(), PARAMETERS, sizes, strict=True):
        if zero_stage == 3:
            part = -(-size // layout.dp_size)
            begin = 0
        first = min(max(dp_rank * part - begin, 0), size)
        stop = min(max((dp_rank + 1) * part - begin, 0), size)
        shard = split(whole, partition, tp_rank, layout.tp_size).flatten()
        held.append(shard[first:stop])
        cuts.append((sharded_parameter(shape, partition, tp), first, stop - first))
        begin += size
    flat = torch.cat(held)
    starts = [0]
    for values in held:
        starts.append(starts[-1] + len(values))
    shards: list[OptimizerShard] = []
    for (parameter, first, length), start in zip(cuts, starts[:-1], strict=True):
        shards.append(OptimizerShard(parameter, flat, start, first, length))
    return shards, flat


def mapped(tp_size: int, world_size: int, zero_stage: int, bucket: int) -> tuple[bool, int]:
    """On one rank: whether each of its elements is the one of the mapped matrix, and how many
    matrices it computed."""
    layout = Layout(world_size, tp_size)
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    divided_matrices.BUCKET_ELEMENTS = bucket
    shards, flat = divided(layout, rank, zero_stage)
    computed = 0

    def counted(matrices: Tensor) -> Tensor:
        nonlocal computed
        computed += len(matrices)
        return turned(matrices)

    found = torch.full_like(flat, torch.nan)
    for place, shape, values in DividedMatrices(shards, layout).map(counted, flat, flat.dtype):
        found[place] = values
        assert len(shape) == 2
    expected = torch.empty_like(flat)
    for shard, whole, (_, partition) in zip(shards, whole_parameters(), PARAMETERS, strict=True):
        own = split(turned(whole), partition, layout.tp_rank(rank), tp_size).flatten()
        shard.within(expected).copy_(own[shard.first : shard.first + shard.length])
    return torch.equal(found, expected), computed


MATRICES = 5 + 3 + 2
"""Of `PARAMETERS`, with each expert's."""


@pytest.mark.parametrize("bucket", [1, 2**20])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_one_process_computes_every_matrix(zero_stage, bucket, monkeypatch):
    monkeypatch.setattr(divided_matrices, "BUCKET_ELEMENTS", bucket)
    assert mapped(1, 1, zero_stage, bucket) == (True, MATRICES)


@pytest.mark.parametrize(
    ("tp_size", "world_size"), [(1, 2), (1, 3), (1, 8), (2, 2), (2, 4), (4, 4)]
)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_every_layout_computes_each_matrix_once(tp_size, world_size, zero_stage):
    done = run_ranks(mapped, world_size, tp_size, world_size, zero_stage, 40)
    assert all(is_equal for is_equal, _ in done)
    assert sum(computed for _, computed in done) == MATRICES
    # The work is shared: no rank has nearly all of it.
    assert max(computed for _, computed in done) <= -(-MATRICES // world_size) + 2


@given(st.data())
def test_the_pieces_of_a_matrix_hold_each_of_its_elements_once(data):
    experts = data.draw(st.integers(1, 4))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    size = experts * rows * columns
    ranks = data.draw(st.integers(1, 7))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
    bounds = list(pairwise([0, *cuts, size]))
    held = torch.tensor([(first, stop - first) for first, stop in bounds])
    rank = data.draw(st.integers(0, ranks - 1))
    first, length = held[rank].tolist()
    parameter = sharded_parameter((experts, rows, columns), REPLICATED, TensorParallel())
    shard = OptimizerShard(parameter, torch.zeros(length), 0, first, length)
    matrices = _matrices_of(shard, held, Layout(ranks), rank)
    assert len(matrices) == experts
    flat = torch.arange(first, first + length)
    for expert, matrix in enumerate(matrices):
        elements: list[int] = []
        for piece in matrix.pieces:
            elements += range(piece.first, piece.first + piece.length)
            if piece.rank == rank:
                own = flat[matrix.start : matrix.start + piece.length] - expert * rows * columns
                assert own.tolist() == list(range(piece.first, piece.first + piece.length))
        assert elements == list(range(rows * columns))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1), st.integers(1, 9))
def test_no_owner_has_more_than_the_mean_and_one_matrix(shapes, ranks):
    parameter = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    matrices = []
    for one in parameter:
        held = torch.tensor([(0, one.numel())] + [(one.numel(), 0)] * (ranks - 1))
        shard = OptimizerShard(one, torch.empty(0), 0, 0, one.numel())
        matrices += _matrices_of(shard, held, Layout(ranks), 0)
    loads = [0] * ranks
    for matrix, owner in zip(matrices, _owners(matrices, ranks), strict=True):
        loads[owner] += matrix.cost
    most = max(matrix.cost for matrix in matrices)
    assert max(loads) <= sum(loads) / ranks + most


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_bucket_has_a_large_matrix_for_every_rank(ranks, monkeypatch):
    """Ranks that own none of a bucket wait for those that do."""
    monkeypatch.setattr(divided_matrices, "BUCKET_ELEMENTS", 1)
    matrices = []
    for _ in range(4 * ranks):
        parameter = nn.Parameter(torch.empty(8, 16))
        shard = OptimizerShard(parameter, torch.empty(0), 0, 0, 0)
        matrices += _matrices_of(shard, torch.zeros(ranks, 2, dtype=torch.int64), Layout(ranks), 0)
    buckets = _buckets(matrices, ranks)
    assert len(buckets) == 4
    for bucket in buckets:
        assert sorted(bucket.owners) == list(range(ranks))


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_bucket_takes_an_equal_share_of_each_rank(ranks, monkeypatch):
    """ZeRO-1 and 2 give a rank consecutive layers."""
    layers = 16
    shapes = [(4, 8), (8, 16), (16, 8)] * layers
    part = sum(map(prod, shapes)) // ranks
    monkeypatch.setattr(divided_matrices, "BUCKET_ELEMENTS", part // 4)
    matrices = []
    begin = 0
    for shape in shapes:
        parameter = nn.Parameter(torch.empty(shape))
        held = []
        for rank in range(ranks):
            first = min(max(rank * part - begin, 0), prod(shape))
            stop = min(max((rank + 1) * part - begin, 0), prod(shape))
            held.append((first, stop - first))
        shard = OptimizerShard(parameter, torch.empty(0), 0, *held[0])
        matrices += _matrices_of(shard, torch.tensor(held), Layout(ranks), 0)
        begin += prod(shape)

    buckets = _buckets(matrices, ranks)
    assert len(buckets) == 4
    assert sum(len(bucket.matrices) for bucket in buckets) == len(matrices)
    largest = max(map(prod, shapes))
    for bucket in buckets:
        lengths = [0] * ranks
        for matrix in bucket.matrices:
            for piece in matrix.pieces:
                lengths[piece.rank] += piece.length
        assert max(lengths) <= part // 4 + largest
