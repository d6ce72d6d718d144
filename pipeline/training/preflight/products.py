"""Whether every rank multiplies right, and none is much slower than the rest.

The matrix is Sylvester's: H of ±1, H·H = n·I. Its rows and columns are scaled by small integers and by 1/n, so that the
right answer is known without computing it, and every partial sum over an aligned run of products is one that bf16 and
fp16 hold: the products must come out exactly, in any dtype and however a kernel splits the sum.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.training.preflight.devices import wait_for
from pipeline.training.preflight.finding import Fault, Finding
from pipeline.training.preflight.ranks import Ranks

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 7
_SCALES = 16


class Product(NamedTuple):
    """What one rank's matrix products were like: what went wrong, if anything, and the median of their seconds."""

    wrong: str | None
    seconds: float


def sylvester(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix, [size, size]; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        upper, lower = torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([upper, lower])
    return matrix


def measure_product(dtype: torch.dtype, device: torch.device) -> Product:
    """Multiplies a few times and compares every element with what it must be."""
    size = SIZE[device.type]
    hadamard = sylvester(size, dtype, device)
    scales = (1 + torch.arange(size, device=device) % _SCALES).to(dtype)
    left, right = scales[:, None] * hadamard, hadamard * (scales / size)
    expected = torch.diag(scales * scales)
    seconds, differing = [], 0
    try:
        for _ in range(1 + REPEATS):
            wait_for(device)
            started = time.perf_counter()
            product = torch.mm(left, right)
            wait_for(device)
            seconds.append(time.perf_counter() - started)
            differing = max(differing, int((product != expected).sum()))
    except RuntimeError as error:  # CUDA's own faults are of this kind
        return Product(f"failed: {str(error).splitlines()[0]}", 0.0)
    wrong = f"has {differing} wrong elements of {size * size}" if differing else None
    return Product(wrong, statistics.median(seconds[1:]))


def check_products(ranks: Ranks, dtype: torch.dtype, device: torch.device, slow_factor: float) -> Finding:
    """Multiplies on all ranks at once; every rank must call it."""
    products: list[Product] = [Product(None, 0.0)] * len(ranks.nodes)
    dist.all_gather_object(products, measure_product(dtype, device))
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a GPU that failed above
            torch.cuda.empty_cache()  # what torch keeps for later would look like another process's
    finding = judge_products(products, ranks, slow_factor)
    speed = 2 * SIZE[device.type] ** 3 / max(products[0].seconds, 1e-9) / 1e12
    return finding._replace(measured=f"{finding.measured}, {speed:.3g} TFLOP/s in {str(dtype).removeprefix('torch.')}")


def judge_products(products: Sequence[Product], ranks: Ranks, slow_factor: float) -> Finding:
    """What the ranks' `products`, by rank, say. A rank is compared with those of other nodes, where there are any."""
    faults = []
    slownesses = [slowness(rank, products, ranks) for rank in range(len(products))]
    for node, first in ranks.first_on.items():
        own = [rank for rank in range(first, len(products)) if ranks.nodes[rank] == node]
        for rank in own:
            if (wrong := products[rank].wrong) is not None:
                text = f"rank {rank} on {node}: a matrix product {wrong}; its processor is broken"
                faults.append(Fault(text, node, passing=True))
        worst = max(own, key=slownesses.__getitem__)
        if slownesses[worst] > slow_factor:
            faults.append(
                Fault(
                    f"rank {worst} on {node}: a matrix product takes {slownesses[worst]:.1f} times as long as "
                    f"elsewhere, expected at most {slow_factor:g} (preflight.slow_factor)",
                    node,
                    passing=True,
                )
            )
    worst = max(range(len(products)), key=slownesses.__getitem__)
    broken = sum(product.wrong is not None for product in products)
    says = f"wrong on {broken} rank(s)" if broken else "right on every rank"
    return Finding(
        f"matrix products {says}; the slowest, rank {worst} on {ranks.nodes[worst]}, takes "
        f"{products[worst].seconds * 1e3:.3g} ms, {slownesses[worst]:.2f} times what others take",
        tuple(faults),
    )


def slowness(rank: int, products: Sequence[Product], ranks: Ranks) -> float:
    """How many times as long as the others' `rank`'s product takes; 1 where there are no others."""
    sound = [other for other in range(len(products)) if products[other].wrong is None and other != rank]
    elsewhere = [other for other in sound if ranks.nodes[other] != ranks.nodes[rank]]
    if products[rank].wrong is not None or not sound:
        return 1.0
    return products[rank].seconds / statistics.median(products[other].seconds for other in elsewhere or sound)
