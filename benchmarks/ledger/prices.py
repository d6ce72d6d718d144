"""From bytes, FLOPs and kernels to milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.ledger.tape import FLASH, Operation
from benchmarks.ledger.traffic import total_bytes
from benchmarks.results import Row


@dataclass(frozen=True)
class Prices:
    """What a GPU does in a second. The defaults are those of an H100 (80 GB HBM3).

    Attributes:
        terabytes: of its memory, read or written.
        product_tflops: of matrix products in 16 bits.
        flash_tflops, cudnn_tflops: of attention, forward and backward, with all pairs of tokens
            counted, as in `pipeline.sizing.flops`; for packed documents and for whole rows. Of
            these pairs causal attention computes half, so that they may exceed the peak.
        kernel_microseconds: the least time of an operation.
    """

    terabytes: float = 2.9
    product_tflops: float = 700
    flash_tflops: tuple[float, float] = (558, 400)
    cudnn_tflops: tuple[float, float] = (871, 593)
    kernel_microseconds: float = 6

    def milliseconds(self, operation: Operation) -> float:
        """The time of an operation: the largest of its bytes', its FLOPs' and its start's."""
        return max(
            moved_bytes(operation) / self.terabytes / 1e9,
            operation.flops / self._tflops(operation) / 1e9,
            self.kernel_microseconds / 1e3,
        )

    def _tflops(self, operation: Operation) -> float:
        if operation.kind != "attention":
            return self.product_tflops
        forward, backward = self.cudnn_tflops
        if operation.name in FLASH:
            forward, backward = self.flash_tflops
        return backward if operation.backward else forward


def moved_bytes(operation: Operation) -> int:
    """The bytes that an operation reads and writes."""
    return total_bytes(operation.reads) + total_bytes(operation.writes)


def sums(
    operations: Iterable[Operation], prices: Prices, key: Callable[[Operation], str]
) -> list[Row]:
    """A row for each value of `key`, that with most time first."""
    rows: dict[str, Row] = {}
    for operation in operations:
        name = key(operation)
        row = rows.setdefault(name, empty_row(name))
        row["kernels"] += 1
        row["collectives"] += int(operation.kind == "collective")
        row["read_gb"] += total_bytes(operation.reads) / 1e9
        row["written_gb"] += total_bytes(operation.writes) / 1e9
        row["tflop"] += operation.flops / 1e12
        row["ms"] += prices.milliseconds(operation)
    return sorted(rows.values(), key=lambda row: -float(row["ms"]))


def empty_row(name: str) -> Row:
    """A row that counts nothing yet."""
    return {
        "part": name,
        "kernels": 0,
        "collectives": 0,
        "read_gb": 0.0,
        "written_gb": 0.0,
        "tflop": 0.0,
        "ms": 0.0,
    }


def summed(rows: Iterable[Row], name: str) -> Row:
    """All rows as one."""
    total = empty_row(name)
    for row in rows:
        for column, value in row.items():
            if column != "part":
                total[column] += value
    return total
