"""Processors and links before the first step: exact matrix products and sums, and their speed.

`measure_...` measures this rank's; `judge_...` is a pure function of what all ranks measured. `nodes` holds the node of
every rank, by rank, under its Slurm name.
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
    """A fault; `node` is the node to exclude, if that would repair it; `passing`: another attempt may not meet it."""

    text: str
    node: str | None = None
    passing: bool = False


class Finding(NamedTuple):
    """What a check measured, as a line for the log, and its faults."""

    measured: str
    faults: Sequence[Fault] = ()


def _now(device: torch.device) -> float:
    """The time in seconds, once a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- Matrix products: correct on every rank, and about equally fast -------------------------------------------------
# The matrix is Sylvester's: H of ±1, H·H = n·I. Its rows and columns are scaled by small integers and by 1/n. So the
# result is known in advance, and bf16 and fp16 represent every partial sum over an aligned run of products: the result
# must be exact in any dtype, however a kernel splits the sum.

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 7
_SCALES = 16


class Product(NamedTuple):
    """The matrix products of a rank: the fault, if any, and the median time in seconds."""

    wrong: str | None
    seconds: float


def measure_product(dtype: torch.dtype, device: torch.device) -> Product:
    """Multiplies several times and compares every element with its known value."""
    size = SIZE[device.type]
    pair = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device)
    hadamard = reduce(torch.kron, [pair] * (size.bit_length() - 1))
    scales = (1 + torch.arange(size, device=device) % _SCALES).to(dtype)
    left, right, expected = (
        scales[:, None] * hadamard,
        hadamard * (scales / size),
        torch.diag(scales * scales),
    )
    seconds, differing = [], 0
    try:
        for _ in range(1 + REPEATS):
            started = _now(device)
            product = torch.mm(left, right)
            seconds.append(_now(device) - started)
            differing = max(differing, int((product != expected).sum()))
        if device.type == "cuda":
            del left, right, hadamard, product, expected
            torch.cuda.empty_cache()  # torch's cache would look like another process's memory
    except RuntimeError as error:  # CUDA errors are RuntimeErrors
        return Product(f"failed: {str(error).splitlines()[0]}", 0.0)
    wrong = f"has {differing} wrong elements of {size * size}" if differing else None
    return Product(wrong, statistics.median(seconds[1:]))


def judge_products(
    products: Sequence[Product], nodes: Sequence[str], device_type: str, slow_factor: float | None
) -> Finding:
    """Judges the products of all ranks; one that takes longer than the others by `slow_factor` is a fault."""
    faults, slowness = [], []
    for rank, product in enumerate(products):
        others = [
            one.seconds for other, one in enumerate(products) if one.wrong is None and other != rank
        ]
        slowness.append(
            product.seconds / statistics.median(others) if others and product.wrong is None else 1.0
        )
        if product.wrong is not None:
            text = f"rank {rank} on {nodes[rank]}: a matrix product {product.wrong}; its processor is broken"
            faults.append(Fault(text, nodes[rank], passing=True))
    by_speed = sorted(range(len(products)), key=slowness.__getitem__)
    for node, rank in {nodes[rank]: rank for rank in by_speed}.items():  # the slowest of each node
        if slow_factor is not None and slowness[rank] > slow_factor:
            found = f"a matrix product takes {slowness[rank]:.1f} times as long as elsewhere"
            limit = f"expected at most {slow_factor:g} (preflight.slow_factor)"
            faults.append(Fault(f"rank {rank} on {node}: {found}, {limit}", node, passing=True))
    worst = by_speed[-1]
    speed = 2 * SIZE[device_type] ** 3 / max(products[worst].seconds, 1e-9) / 1e12
    verdict = (
        "not right on every rank"
        if any(product.wrong for product in products)
        else "right on every rank"
    )
    where = f"rank {worst} on {nodes[worst]}: {speed:.3g} TFLOP/s, {slowness[worst]:.2f} times the others' time"
    return Finding(f"matrix products {verdict}; the slowest, {where}", faults)


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
    pattern = (
        torch.arange(MESSAGE_BYTES[device.type] // 4, dtype=torch.int32, device=device) % _DISTINCT
    )
    expected = pattern * (size * (size + 1) // 2)
    wrong, seconds = None, []
    try:
        for _ in range(1 + MESSAGE_REPEATS):
            message = pattern * (rank + 1)
            # The first call of a group: NCCL would guess its device.
            dist.barrier(group, device_ids=None if device.index is None else [device.index])
            started = _now(device)
            dist.all_reduce(message, group=group)
            seconds.append(_now(device) - started)
            wrong = wrong if torch.equal(message, expected) else "a wrong sum"
    except RuntimeError as error:  # raised by gloo and NCCL where a connection fails
        return Link(f"failed ({str(error).splitlines()[0]})", 0.0)
    sent_bytes = 2 * (size - 1) / size * MESSAGE_BYTES[device.type]
    return Link(
        wrong, sent_bytes / statistics.median(seconds[1:]) / 1e9
    )  # the first opens the connections


def judge_all_reduce(
    kind: str,
    links: Sequence[Link],
    groups: Sequence[Sequence[int]],
    nodes: Sequence[str],
    min_gb_per_s: float,
) -> Finding:
    """Judges the links of all ranks, whose `groups` of a `kind` were measured at the same time, as training does."""

    def speed_of(group: Sequence[int]) -> float:
        return min(links[rank].gb_per_s for rank in group)

    def nodes_of(group: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(nodes[rank] for rank in group))

    faults = []
    for group in groups:
        where = (
            f"all-reduce over the {kind} group of ranks {_join(group)} ({_join(nodes_of(group))})"
        )
        if wrong := [rank for rank in group if links[rank].wrong is not None]:
            on = _join([f"{rank} ({nodes[rank]})" for rank in wrong])
            text = f"{links[wrong[0]].wrong} on rank(s) {on}; exclude the nodes of the group one after the other"
            faults.append(Fault(f"{where}: {text}", passing=True))
        elif speed_of(group) < min_gb_per_s:
            text = f"{speed_of(group):.3g} GB/s, expected at least {min_gb_per_s:g} (preflight.min_gb_per_s)"
            advice = (
                "check the network between these nodes, and NETWORK_INTERFACE in slurm/site.env"
            )
            faults.append(Fault(f"{where}: {text}; {advice}", passing=True))
    slow = min(groups, key=speed_of)
    reach = (
        "within a node" if all(len(nodes_of(group)) == 1 for group in groups) else "across nodes"
    )
    measured = f"{kind} all-reduce over {len(slow)} ranks {reach}: {speed_of(slow):.3g} GB/s"
    return Finding(f"{measured} (the slowest group: ranks {_join(slow)})", faults)


def _join(items: Sequence[object], most: int = 8) -> str:
    """The first few of `items`."""
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown}, … ({len(items)})"
