"""Nodes, devices and links before the first step: exact matrix products and sums, and their speed.

`measure_...` measures this rank's; `judge_...` is a pure function of what all ranks measured.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Fault(NamedTuple):
    """A fault; `node` is the node to exclude, if that would repair it.

    `passing`: another attempt may not meet it.
    """

    text: str
    node: str | None = None
    passing: bool = False


class Finding(NamedTuple):
    """What a check measured, as a line for the log, its faults, and what does not keep the run from starting."""

    measured: str
    faults: Sequence[Fault] = ()
    warnings: Sequence[str] = ()


class Ranks(NamedTuple):
    """The node of every rank, by rank, under its Slurm name; and this rank's number."""

    nodes: tuple[str, ...]
    rank: int

    @property
    def first_rank_of(self) -> dict[str, int]:
        """The lowest rank of each node, in the order of ranks."""
        return {node: self.nodes.index(node) for node in dict.fromkeys(self.nodes)}

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank

    @property
    def count_on_node(self) -> int:
        """How many ranks share this one's node."""
        return self.nodes.count(self.nodes[self.rank])

    def nodes_of(self, ranks: Iterable[int]) -> list[str]:
        """The distinct nodes of `ranks`."""
        return list(dict.fromkeys(self.nodes[rank] for rank in ranks))


def describe_ranks(ranks: Ranks) -> Finding:
    """The number of ranks per node."""
    counts = Counter(ranks.nodes)
    most, least = max(counts.values()), min(counts.values())
    shares = f"{most} on each of" if most == least else f"{least} to {most} on each of"
    return Finding(f"{len(ranks.nodes)} rank(s), {shares} {len(counts)} node(s): {', '.join(counts)}")


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- Matrix products: correct on every rank, and about equally fast -------------------------------------------------
# The matrix is Sylvester's: H of ±1, H·H = n·I. Its rows and columns are scaled by small integers and by 1/n. So the
# result is known in advance, and bf16 and fp16 represent every partial sum over an aligned run of products: the result
# must be exact in any dtype, however a kernel splits the sum.

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 7
_NOTABLY_SLOW = {"cuda": 1.5, "cpu": 20.0}  # the cores of CPUs may be shared
_SCALES = 16


class Product(NamedTuple):
    """The matrix products of a rank: the fault, if any, and the median time in seconds."""

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
    """Multiplies several times and compares every element with its known value."""
    size = SIZE[device.type]
    hadamard = sylvester(size, dtype, device)
    scales = (1 + torch.arange(size, device=device) % _SCALES).to(dtype)
    left, right = scales[:, None] * hadamard, hadamard * (scales / size)
    expected = torch.diag(scales * scales)
    seconds, differing = [], 0
    try:
        for _ in range(1 + REPEATS):
            synchronize(device)
            started = time.perf_counter()
            product = torch.mm(left, right)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            differing = max(differing, int((product != expected).sum()))
        if device.type == "cuda":
            del left, right, hadamard, product, expected
            torch.cuda.empty_cache()  # torch's cache would look like another process's memory
    except RuntimeError as error:  # CUDA errors are RuntimeErrors
        return Product(f"failed: {str(error).splitlines()[0]}", 0.0)
    wrong = f"has {differing} wrong elements of {size * size}" if differing else None
    return Product(wrong, statistics.median(seconds[1:]))


def judge_products(
    products: Sequence[Product], ranks: Ranks, dtype: torch.dtype, device: torch.device, slow_factor: float | None
) -> Finding:
    """Judges the products of all ranks, each compared with those of other nodes, if there are any.

    A rank slower by `slow_factor` is a fault; by default, one by 1.5 (20 on CPUs) is a warning.
    """
    faults, warnings = [], []
    slownesses = [_slowness(rank, products, ranks) for rank in range(len(products))]
    for rank, product in enumerate(products):
        if product.wrong is not None:
            text = f"rank {rank} on {ranks.nodes[rank]}: a matrix product {product.wrong}; its processor is broken"
            faults.append(Fault(text, ranks.nodes[rank], passing=True))
    for node in ranks.first_rank_of:
        worst = max((rank for rank, own in enumerate(ranks.nodes) if own == node), key=slownesses.__getitem__)
        text = f"rank {worst} on {node}: a matrix product takes {slownesses[worst]:.1f} times as long as elsewhere"
        if slow_factor is not None and slownesses[worst] > slow_factor:
            limit = f"expected at most {slow_factor:g} (preflight.slow_factor)"
            faults.append(Fault(f"{text}, {limit}", node, passing=True))
        elif slow_factor is None and slownesses[worst] > _NOTABLY_SLOW[device.type]:
            warnings.append(f"{text}: every step waits for it (preflight.slow_factor refuses it)")
    worst = max(range(len(products)), key=slownesses.__getitem__)
    wrong_ranks = sum(product.wrong is not None for product in products)
    verdict = f"wrong on {wrong_ranks} rank(s)" if wrong_ranks else "right on every rank"
    speed = 2 * SIZE[device.type] ** 3 / max(products[0].seconds, 1e-9) / 1e12
    return Finding(
        f"matrix products {verdict}; the slowest, rank {worst} on {ranks.nodes[worst]}, takes "
        f"{products[worst].seconds * 1e3:.3g} ms, {slownesses[worst]:.2f} times what others take, {speed:.3g} TFLOP/s "
        f"in {str(dtype).removeprefix('torch.')}",
        faults,
        warnings,
    )


def _slowness(rank: int, products: Sequence[Product], ranks: Ranks) -> float:
    """The time of `rank`'s product divided by the median of the others; 1 where there are no others."""
    correct = [other for other in range(len(products)) if products[other].wrong is None and other != rank]
    elsewhere = [other for other in correct if ranks.nodes[other] != ranks.nodes[rank]]
    if products[rank].wrong is not None or not correct:
        return 1.0
    return products[rank].seconds / statistics.median(products[other].seconds for other in elsewhere or correct)


# --- All-reduce: correct and fast enough, within tensor-parallel and within data-parallel groups ---------------------

MESSAGE_BYTES = {"cuda": 64 * 2**20, "cpu": 2 * 2**20}
MESSAGE_REPEATS = 5
_DISTINCT = 13
"""The summands are below this, so that int32 holds their sum over any realistic number of ranks."""


class Link(NamedTuple):
    """The all-reduce of a rank's group: the fault, if any, and what each rank of a ring sends per second."""

    wrong: str | None
    gb_per_s: float


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Sums a known tensor over `group` several times; each of its ranks must call it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    pattern = torch.arange(MESSAGE_BYTES[device.type] // 4, dtype=torch.int32, device=device) % _DISTINCT
    expected = pattern * (size * (size + 1) // 2)
    wrong, seconds = None, []
    try:
        for _ in range(1 + MESSAGE_REPEATS):
            message = pattern * (rank + 1)
            # The first call of a group: NCCL would guess its device.
            dist.barrier(group, device_ids=None if device.index is None else [device.index])
            synchronize(device)
            started = time.perf_counter()
            dist.all_reduce(message, group=group)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            wrong = wrong if torch.equal(message, expected) else "a wrong sum"
    except RuntimeError as error:  # raised by gloo and NCCL where a connection fails
        return Link(f"failed ({str(error).splitlines()[0]})", 0.0)
    sent_bytes = 2 * (size - 1) / size * MESSAGE_BYTES[device.type]
    return Link(wrong, sent_bytes / statistics.median(seconds[1:]) / 1e9)  # the first opens the connections


def judge_all_reduce(
    kind: str, links: Sequence[Link], groups: Sequence[Sequence[int]], ranks: Ranks, min_gb_per_s: float
) -> Finding:
    """Judges the links of all ranks, whose `groups` of a `kind` were measured at the same time, as training does."""
    faults = []
    for group in groups:
        where = f"all-reduce over the {kind} group of ranks {_join(group)} ({_join(ranks.nodes_of(group))})"
        if wrong := [rank for rank in group if links[rank].wrong is not None]:
            on = _join([f"{rank} ({ranks.nodes[rank]})" for rank in wrong])
            what = links[wrong[0]].wrong
            text = f"{where}: {what} on rank(s) {on}; exclude the nodes of the group one after the other"
            faults.append(Fault(text, passing=True))
        elif (slowest := min(links[rank].gb_per_s for rank in group)) < min_gb_per_s:
            text = f"{where}: {slowest:.3g} GB/s, expected at least {min_gb_per_s:g} (preflight.min_gb_per_s)"
            advice = "check the network between these nodes, and NETWORK_INTERFACE in slurm/site.env"
            faults.append(Fault(f"{text}; {advice}", passing=True))
    slow = min(groups, key=lambda group: min(links[rank].gb_per_s for rank in group))
    speed = min(links[rank].gb_per_s for rank in slow)
    reach = "within a node" if all(len(ranks.nodes_of(group)) == 1 for group in groups) else "across nodes"
    measured = f"{kind} all-reduce over {len(slow)} ranks {reach}: {speed:.3g} GB/s"
    return Finding(f"{measured} (the slowest group: ranks {_join(slow)})", faults)


def _join(items: Sequence[object], most: int = 8) -> str:
    """The first few of `items`."""
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown}, … ({len(items)})"
