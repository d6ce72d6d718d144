"""What a compiler makes of the operations of one graph, estimated.

Between two products of a graph (matrix products, attention, collectives) everything is taken for
one kernel. It reads once what existed before, writes what a later operation reads, and keeps
the rest in registers. So it is assumed that a reduction along a row reads that row from the cache
again, and that nothing is fused into a product.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.ledger.tape import Operation
from benchmarks.ledger.traffic import Access


def fused(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with those of each compiled graph joined."""
    last_reads: dict[int, int] = {}
    for position, operation in enumerate(operations):
        for access in operation.reads:
            last_reads[access.storage] = position

    found: list[Operation] = []
    first = 0
    while first < len(operations):
        end = _end_of_chain(operations, first)
        chain = operations[first:end]
        found.append(chain[0] if len(chain) == 1 else _joined(chain, end, last_reads))
        first = end
    return found


def _end_of_chain(operations: Sequence[Operation], first: int) -> int:
    """Where the operations end that are one kernel with the one at `first`."""
    begin = operations[first]
    end = first + 1
    if begin.region is None or begin.kind != "pointwise":
        return end
    while end < len(operations):
        operation = operations[end]
        if operation.region != begin.region or operation.kind != "pointwise":
            break
        end += 1
    return end


def _joined(chain: Sequence[Operation], end: int, last_reads: dict[int, int]) -> Operation:
    """One operation in place of a chain that ends before position `end`."""
    made: set[int] = set()
    reads: list[Access] = []
    writes: list[Access] = []
    for operation in chain:
        for access in operation.reads:
            if access.storage not in made:
                reads.append(access)
        for access in operation.writes:
            made.add(access.storage)
            if last_reads.get(access.storage, -1) >= end:
                writes.append(access)
    return Operation(
        name="fused",
        module=chain[0].module,
        backward=chain[0].backward,
        kind="pointwise",
        reads=tuple(reads),
        writes=tuple(writes),
        region=chain[0].region,
        fused=len(chain),
    )
