"""Matrices whose elements ZeRO and tensor parallelism have divided over the ranks.

An optimizer that needs whole matrices has each of them put together on one rank, its owner, which
computes and sends the results back:

    every rank  --- its elements of each matrix, to the owner --->  owner: f of the whole matrix
    every rank  <-- its elements of the result -------------------  owner

So each matrix is computed once, and a rank sends and receives about as many elements as it holds.
Owners are chosen by cost. Matrices go in buckets, which bound the memory of the messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.parameters import OptimizerShard, full_shape_of, partition_of
from pipeline.parallel.sharding import Partition, local_shape, merge, split
from pipeline.parallel.topology import Layout

BUCKET_ELEMENTS = 2**26
"""About how many elements a rank receives at a time: 128 MiB in 16 bits. Of larger matrices it
receives one."""
BATCH_ELEMENTS = 2**26
"""At most how many elements of equal matrices are computed together, unless one has more."""


class Piece(NamedTuple):
    """Which elements of its flattened shard of a matrix a rank holds."""

    rank: int
    first: int
    length: int


@dataclass(frozen=True)
class DividedMatrix:
    """A matrix, and which rank holds which of its elements.

    Attributes:
        shape: [out, in], of the whole matrix.
        partition: how it is split over the tensor-parallel ranks.
        pieces: of all ranks that hold some of its elements, in rank order.
        start: where this rank's piece lies in the optimizer's flat tensor, if it has one.
    """

    shape: tuple[int, int]
    partition: Partition
    pieces: tuple[Piece, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def cost(self) -> int:
        """How long an iteration takes that multiplies the matrix by its Gram matrix, in proportion
        to others."""
        return self.size * min(self.shape)

    def sources(self, layout: Layout) -> list[Piece]:
        """The pieces that make the whole matrix: of equal shards, those of the first holder."""
        replicas = self.partition.replicas(layout.tp_size)
        return [one for one in self.pieces if layout.tp_rank(one.rank) % replicas == 0]


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together, and the owner of each."""

    matrices: tuple[DividedMatrix, ...]
    owners: tuple[int, ...]


class DividedMatrices:
    """The matrices in one flat tensor of the optimizer, and how their elements reach their owners.

    Making it is a collective, as `map` is.
    """

    def __init__(self, shards: Sequence[OptimizerShard], layout: Layout) -> None:
        """`shards`: what this rank holds of each parameter, perhaps nothing; in the same order on
        all ranks. A parameter is a matrix, or a stack of them [experts, out, in]."""
        self._layout = layout
        self._rank = dist.get_rank() if layout.world_size > 1 else 0
        matrices: list[DividedMatrix] = []
        for shard, held in zip(shards, _held_by_all(shards, layout), strict=True):
            matrices += _matrices_of(shard, held, layout, self._rank)
        self._buckets = _buckets(matrices, layout.world_size)

    @torch.no_grad()
    def map(
        self, function: Callable[[Tensor], Tensor], values: Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, tuple[int, int], Tensor]]:
        """The results of `function` for whole matrices, as far as this rank holds their elements.

        Args:
            function: takes matrices of one shape [n, out, in] in `dtype`, and gives as many of that
                shape and type.
            values: this rank's elements of all matrices, in the optimizer's flat layout.
            dtype: of the messages.

        Yields:
            Where the elements of a matrix lie in the flat layout, its shape, and its results there.
        """
        values = values.to(dtype)
        for bucket in self._buckets:
            whole = self._to_owners(bucket, values)
            results = self._computed(whole, function)
            yield from self._from_owners(bucket, results, values)

    def _to_owners(self, bucket: Bucket, values: Tensor) -> dict[int, Tensor]:
        """The matrices of `bucket` that this rank owns, by their number in it, each put together
        from the pieces of all ranks."""
        layout = self._layout
        sent: list[list[Tensor]] = [[] for _ in range(layout.world_size)]
        lengths = [0] * layout.world_size
        owned: list[int] = []
        for number, (matrix, owner) in enumerate(zip(bucket.matrices, bucket.owners, strict=True)):
            if owner == self._rank:
                owned.append(number)
            for piece in matrix.sources(layout):
                if piece.rank == self._rank:
                    sent[owner].append(values[matrix.start : matrix.start + piece.length])
                if owner == self._rank:
                    lengths[piece.rank] += piece.length
        received = self._exchanged(sent, lengths, values)

        whole: dict[int, Tensor] = {}
        next_in = [0] * layout.world_size
        for number in owned:
            matrix = bucket.matrices[number]
            local = local_shape(matrix.shape, matrix.partition, layout.tp_size)
            shards = values.new_zeros(layout.tp_size, prod(local))
            for piece in matrix.sources(layout):
                first = next_in[piece.rank]
                next_in[piece.rank] += piece.length
                elements = received[piece.rank][first : first + piece.length]
                shard = shards[layout.tp_rank(piece.rank)]
                shard[piece.first : piece.first + piece.length] = elements
            whole[number] = merge(
                shards.view(layout.tp_size, *local).unbind(),
                matrix.partition,
                matrix.shape[matrix.partition.dim or 0],
            )
        return whole

    def _computed(
        self, whole: dict[int, Tensor], function: Callable[[Tensor], Tensor]
    ) -> dict[int, Tensor]:
        """`function` of each matrix; those of one shape together."""
        by_shape: dict[torch.Size, list[int]] = {}
        for number, matrix in whole.items():
            by_shape.setdefault(matrix.shape, []).append(number)
        results: dict[int, Tensor] = {}
        for shape, numbers in by_shape.items():
            at_once = max(1, BATCH_ELEMENTS // shape.numel())
            for first in range(0, len(numbers), at_once):
                batch = numbers[first : first + at_once]
                computed = function(torch.stack([whole.pop(number) for number in batch]))
                results.update(zip(batch, computed, strict=True))
        return results

    def _from_owners(
        self, bucket: Bucket, results: dict[int, Tensor], like: Tensor
    ) -> Iterator[tuple[slice, tuple[int, int], Tensor]]:
        """This rank's elements of the results, which their owners send.

        `like`: of the type and device of the messages.
        """
        layout = self._layout
        sent: list[list[Tensor]] = [[] for _ in range(layout.world_size)]
        lengths = [0] * layout.world_size
        own: list[tuple[int, DividedMatrix, Piece]] = []
        for number, (matrix, owner) in enumerate(zip(bucket.matrices, bucket.owners, strict=True)):
            for piece in matrix.pieces:
                if owner == self._rank:
                    tp_rank = layout.tp_rank(piece.rank)
                    shard = split(results[number], matrix.partition, tp_rank, layout.tp_size)
                    elements = shard.flatten()[piece.first : piece.first + piece.length]
                    sent[piece.rank].append(elements)
                if piece.rank == self._rank:
                    own.append((owner, matrix, piece))
                    lengths[owner] += piece.length
        received = self._exchanged(sent, lengths, like)
        next_in = [0] * layout.world_size
        for owner, matrix, piece in own:
            first = next_in[owner]
            next_in[owner] += piece.length
            place = slice(matrix.start, matrix.start + piece.length)
            yield place, matrix.shape, received[owner][first : first + piece.length]

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor
    ) -> Sequence[Tensor]:
        """What each rank sends to this one, in rank order.

        Args:
            sent: the flat tensors for each rank.
            lengths: how many elements each rank sends.
            like: of the type and device of the messages.
        """
        message = torch.cat([like.new_empty(0), *(one for parts in sent for one in parts)])
        if self._layout.world_size == 1:
            return [message]
        sent_lengths: list[int] = []
        for parts in sent:
            sent_lengths.append(sum(len(one) for one in parts))
        received = like.new_empty(sum(lengths))
        dist.all_to_all_single(received, message, list(lengths), sent_lengths)
        return received.split(list(lengths))


def _held_by_all(shards: Sequence[OptimizerShard], layout: Layout) -> list[list[tuple[int, int]]]:
    """Which elements of each parameter's flattened shard each rank holds: the first and how many,
    by parameter and rank."""
    if not shards:
        return []
    device = shards[0].flat.device
    own = torch.tensor([(one.first, one.length) for one in shards], device=device)
    if layout.world_size == 1:
        return own.unsqueeze(1).tolist()
    held = own.new_empty(layout.world_size, *own.shape)
    dist.all_gather_into_tensor(held.view(-1, 2), own)
    return held.transpose(0, 1).tolist()


def _matrices_of(
    shard: OptimizerShard, held: Sequence[tuple[int, int]], layout: Layout, rank: int
) -> list[DividedMatrix]:
    """The matrices of a parameter: itself, or those of each expert.

    held: by rank, see `_held_by_all`.
    """
    shape = full_shape_of(shard.parameter)
    partition = partition_of(shard.parameter)
    stacked = len(shape) - 2
    if partition.dim is not None:
        assert partition.dim >= stacked, "the experts of a trained stack are on every rank"
        partition = replace(partition, dim=partition.dim - stacked)
    rows, columns = shape[-2:]
    size = prod(local_shape((rows, columns), partition, layout.tp_size))
    # Of many ranks few hold any of a stack of many experts.
    holders: list[tuple[int, int, int]] = []
    for holder, (first, length) in enumerate(held):
        if length:
            holders.append((holder, first, first + length))
    matrices: list[DividedMatrix] = []
    for number in range(prod(shape[:-2])):
        begin = number * size
        pieces: list[Piece] = []
        for holder, first, end in holders:
            at = max(first, begin)
            stop = min(end, begin + size)
            if stop > at:
                pieces.append(Piece(holder, at - begin, stop - at))
        start = shard.start + max(shard.first, begin) - shard.first
        matrices.append(DividedMatrix((rows, columns), partition, tuple(pieces), start))
    return matrices


def _buckets(matrices: Sequence[DividedMatrix], ranks: int) -> list[Bucket]:
    """The matrices in buckets of about `BUCKET_ELEMENTS` a rank.

    A bucket has room for the largest matrix on every rank: with fewer matrices than ranks some
    ranks would be idle.

    Under ZeRO-1 and 2 a rank holds consecutive matrices. So each bucket takes some of everywhere:
    of consecutive ones a few ranks would send and receive all they hold, while the others wait.
    """
    total = sum(matrix.size for matrix in matrices)
    largest = max((matrix.size for matrix in matrices), default=0)
    count = -(-total // (max(BUCKET_ELEMENTS, largest) * ranks))  # rounded up
    # By size, so that the buckets have equal shares of the large ones; equal ones stay in order.
    by_size = sorted(matrices, key=lambda matrix: matrix.size)
    buckets: list[Bucket] = []
    for number in range(min(count, len(matrices))):
        within = by_size[number::count]
        buckets.append(Bucket(tuple(within), tuple(_owners(within, ranks))))
    return buckets


def _owners(matrices: Sequence[DividedMatrix], ranks: int) -> list[int]:
    """The rank that computes each matrix: the most expensive ones first, each goes to the rank with
    the least to do."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda one: -matrices[one].cost):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + matrices[number].cost, rank))
    return owners
