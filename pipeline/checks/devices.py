"""Processors and links before the first step: exact matrix products and sums, and their speed.

The functions `measure_...` measure this rank. The functions `judge_...` are pure: they judge the
measurements of all ranks. Their argument `nodes` holds the Slurm name of every rank's node, by
rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist


class Fault(NamedTuple):
    """A fault of an allocation."""

    text: str
    node: str | None = None
    """The node that is broken, to be excluded from the job; None: not a single node."""
    passing: bool = False
    """Whether another attempt may succeed."""


class Finding(NamedTuple):
    """What a check measured, as a line for the log, and its faults."""

    measured: str
    faults: Sequence[Fault] = ()


def _now(device: torch.device) -> float:
    """The time in seconds, once a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- Matrix products: correct on every rank, and about equally fast -------------------------------
# H is Sylvester's Hadamard matrix of +1 and -1, with H H = n I. With D a diagonal of small
# integers, (D H) (H D / n) is D², which is known in advance. bf16 and fp16 represent every partial
# sum over an aligned run of products. So the result must be exact in any dtype, however a kernel
# splits the sum.

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 7
_SCALES = 16


class Product(NamedTuple):
    """What a rank measured of its matrix products."""

    wrong: str | None
    """What is wrong with the result, if anything is."""
    seconds: float
    """The median time of a product."""


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
            started = _now(device)
            product = torch.mm(left, right)
            seconds.append(_now(device) - started)
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
            faults.append(Fault(text, nodes[rank], passing=True))
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
            faults.append(Fault(text, node, passing=True))
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


# --- All-reduce: correct and fast enough, within tensor- and within data-parallel groups ----------

MESSAGE_BYTES = {"cuda": 64 * 2**20, "cpu": 2 * 2**20}
MESSAGE_REPEATS = 5
_DISTINCT = 13
"""Summands are below this, so that int32 holds their sum over any realistic number of ranks."""


class Link(NamedTuple):
    """What a rank measured of its group's all-reduce."""

    wrong: str | None
    """What is wrong with the sum, if anything is."""
    gb_per_s: float
    """The rate at which each rank of a ring sends, in GB/s."""


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Sums a known tensor over `group` several times; each of its ranks must call it."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    elements = MESSAGE_BYTES[device.type] // 4
    # Whole numbers: their sums are exact in every order, so any difference is a fault of links or
    # memory.
    pattern = torch.arange(elements, dtype=torch.int32, device=device) % _DISTINCT
    # Rank r sends (r + 1) times the pattern; 1 + 2 + ... + size = size (size + 1) / 2.
    expected = pattern * (size * (size + 1) // 2)
    # NCCL would guess the device of a group's first collective, which is this barrier.
    device_ids = None if device.index is None else [device.index]
    wrong = None
    seconds: list[float] = []
    try:
        for _ in range(1 + MESSAGE_REPEATS):
            message = pattern * (rank + 1)
            dist.barrier(group, device_ids=device_ids)
            started = _now(device)
            dist.all_reduce(message, group=group)
            seconds.append(_now(device) - started)
            if not torch.equal(message, expected):
                wrong = "a wrong sum"
    except RuntimeError as error:  # Gloo and NCCL raise it where a connection fails.
        return Link(f"failed ({str(error).splitlines()[0]})", 0.0)
    # In a ring each rank sends 2 (n - 1) / n of the message.
    sent_bytes = 2 * (size - 1) / size * MESSAGE_BYTES[device.type]
    # The first all-reduce also opens the connections.
    return Link(wrong, sent_bytes / statistics.median(seconds[1:]) / 1e9)


def judge_all_reduce(
    kind: str,
    links: Sequence[Link],
    groups: Sequence[Sequence[int]],
    nodes: Sequence[str],
    min_gb_per_s: float,
) -> Finding:
    """Judges the links of all ranks.

    Args:
        kind: What the groups are, such as "data-parallel".
        links: By rank. All groups were measured at the same time, as training uses them.
        groups: The ranks of each group.
        nodes: By rank.
        min_gb_per_s: A slower group is a fault.
    """

    def speed_of(group: Sequence[int]) -> float:
        # All ranks of a ring wait for the slowest.
        return min(links[rank].gb_per_s for rank in group)

    def nodes_of(group: Sequence[int]) -> list[str]:
        names: dict[str, None] = {}
        for rank in group:
            names[nodes[rank]] = None
        return list(names)

    faults: list[Fault] = []
    for group in groups:
        where = f"the {kind} group of ranks {_join(group)} ({_join(nodes_of(group))})"
        wrong: list[str] = []
        first_wrong = ""
        for rank in group:
            fault = links[rank].wrong
            if fault is not None:
                first_wrong = first_wrong or fault
                wrong.append(f"{rank} ({nodes[rank]})")
        if wrong:
            found = f"{first_wrong} on rank(s) {_join(wrong)}"
            advice = "exclude the nodes of the group one after the other"
        elif speed_of(group) < min_gb_per_s:
            limit = f"expected at least {min_gb_per_s:g} (preflight.min_gb_per_s)"
            found = f"{speed_of(group):.3g} GB/s, {limit}"
            advice = (
                "check the network between these nodes, and NETWORK_INTERFACE in slurm/site.env"
            )
        else:
            continue
        faults.append(Fault(f"all-reduce over {where}: {found}; {advice}", passing=True))
    slowest = min(groups, key=speed_of)
    reach = "across nodes"
    if all(len(nodes_of(group)) == 1 for group in groups):
        reach = "within a node"
    return Finding(
        f"{kind} all-reduce over {len(slowest)} ranks {reach}: {speed_of(slowest):.3g} GB/s "
        f"(the slowest group: ranks {_join(slowest)})",
        faults,
    )


def _join(items: Sequence[object], most: int = 8) -> str:
    """The items in a list, or the first `most` of them and their number."""
    shown = ", ".join(map(str, items[:most]))
    if len(items) <= most:
        return shown
    return f"{shown}, … ({len(items)})"
