"""Matrix products before the first step: right on every rank, and about equally fast.

The product is one whose result is known. H is Sylvester's Hadamard matrix of +1 and -1, with
H H = n I. With D a diagonal of small integers, (D H) (H D / n) is D². bf16 and fp16 represent every
partial sum over an aligned run of products. So the result must be exact in any dtype, however a
kernel splits the sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.clock import time_on
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.parallel.ranks import all_gathered

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 7
_SCALES = 16


class Product(NamedTuple):
    """What a rank measured of its matrix products."""

    wrong: str | None
    """What is wrong with the result, if anything is."""
    seconds: float
    """The median time of a product."""


def check_matrix_products(allocation: Allocation) -> Finding:
    """A matrix product is exact on every rank, and none is slower than preflight.slow_factor."""
    dtype = allocation.inputs.deepspeed_config.dtype
    products = all_gathered(measure_product(dtype, allocation.device))
    slow_factor = allocation.inputs.config.preflight.slow_factor
    return judge_products(products, allocation.nodes, allocation.device.type, slow_factor)


def measure_product(dtype: torch.dtype, device: torch.device) -> Product:
    """Multiplies several times and compares every element with its known value."""
    size = SIZE[device.type]
    pair = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device)
    hadamard = reduce(torch.kron, [pair] * (size.bit_length() - 1))
    scales = (1 + torch.arange(size, device=device) % _SCALES).to(dtype)
    left = scales[:, None] * hadamard
    right = hadamard * (scales / size)
    expected = torch.diag(scales * scales)
    seconds: list[float] = []
    differing = 0
    try:
        for _ in range(1 + REPEATS):
            started = time_on(device)
            product = torch.mm(left, right)
            seconds.append(time_on(device) - started)
            differing = max(differing, int((product != expected).sum()))
        if device.type == "cuda":
            # `check_memory` measures free memory later: torch's cache would look like another
            # process.
            del left, right, hadamard, product, expected
            torch.cuda.empty_cache()
    except RuntimeError as error:  # CUDA errors are RuntimeErrors.
        return Product(f"failed: {str(error).splitlines()[0]}", 0.0)
    wrong = None
    if differing:
        wrong = f"has {differing} wrong elements of {size * size}"
    # The first product also loads the kernel.
    return Product(wrong, statistics.median(seconds[1:]))


def judge_products(
    products: Sequence[Product], nodes: Sequence[str], device_type: str, slow_factor: float | None
) -> Finding:
    """Judges the products of all ranks.

    A wrong product is a fault. So is one that takes more than `slow_factor` times the median time
    of the other ranks; None allows any time.
    """
    faults: list[Fault] = []
    for rank, product in enumerate(products):
        if product.wrong is not None:
            text = (
                f"rank {rank} on {nodes[rank]}: a matrix product {product.wrong}; "
                "its processor is broken"
            )
            faults.append(Fault(text, nodes[rank], transient=True))
    verdict = "not right on every rank" if faults else "right on every rank"
    slowness = [_slowness(products, rank) for rank in range(len(products))]
    by_slowness = sorted(range(len(products)), key=slowness.__getitem__)
    slowest_of_node: dict[str, int] = {}
    for rank in by_slowness:
        # The last rank of each node stays, which is its slowest one.
        slowest_of_node[nodes[rank]] = rank
    for node, rank in slowest_of_node.items():
        if slow_factor is not None and slowness[rank] > slow_factor:
            text = (
                f"rank {rank} on {node}: a matrix product takes {slowness[rank]:.1f} times as long "
                f"as elsewhere, expected at most {slow_factor:g} (preflight.slow_factor)"
            )
            faults.append(Fault(text, node, transient=True))
    slowest = by_slowness[-1]
    operations = 2 * SIZE[device_type] ** 3
    tflops = operations / max(products[slowest].seconds, 1e-9) / 1e12
    return Finding(
        f"matrix products {verdict}; the slowest, rank {slowest} on {nodes[slowest]}: "
        f"{tflops:.3g} TFLOP/s, {slowness[slowest]:.2f} times the others' time",
        faults,
    )


def _slowness(products: Sequence[Product], rank: int) -> float:
    """A rank's time, as a multiple of the median over the other ranks with right products."""
    others: list[float] = []
    for other, product in enumerate(products):
        if other != rank and product.wrong is None:
            others.append(product.seconds)
    if not others or products[rank].wrong is not None:
        return 1.0
    # The median, unlike the mean, hardly changes with a second slow rank.
    return products[rank].seconds / statistics.median(others)
