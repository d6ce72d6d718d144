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
_NOTABLY_SLOW = {"cuda": 1.5, "cpu": 20.0}  # the cores of CPUs may be shared
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
    left, right, expected = scales[:, None] * hadamard, hadamard * (scales / size), torch.diag(scales * scales)
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
    """Judges the products of all ranks, each compared with those of other nodes, if there are any.

    A rank slower by `slow_factor` is a fault; by default, one by 1.5 (20 on CPUs) is a warning.
    """
    faults, warnings = [], []
    slowness = []
    for rank, product in enumerate(products):
        correct = [other for other in range(len(products)) if products[other].wrong is None and other != rank]
        others = [other for other in correct if nodes[other] != nodes[rank]] or correct
        if product.wrong is not None:
            text = f"rank {rank} on {nodes[rank]}: a matrix product {product.wrong}; its processor is broken"
            faults.append(Fault(text, nodes[rank], passing=True))
        comparable = product.wrong is None and others
        slowness.append(product.seconds / statistics.median(products[o].seconds for o in others) if comparable else 1.0)
    for node in dict.fromkeys(nodes):
        worst = max((rank for rank, own in enumerate(nodes) if own == node), key=slowness.__getitem__)
        text = f"rank {worst} on {node}: a matrix product takes {slowness[worst]:.1f} times as long as elsewhere"
        if slow_factor is not None and slowness[worst] > slow_factor:
            limit = f"expected at most {slow_factor:g} (preflight.slow_factor)"
            faults.append(Fault(f"{text}, {limit}", node, passing=True))
        elif slow_factor is None and slowness[worst] > _NOTABLY_SLOW[device_type]:
            warnings.append(f"{text}: every step waits for it (preflight.slow_factor refuses it)")
    worst = max(range(len(products)), key=slowness.__getitem__)
    speed = 2 * SIZE[device_type] ** 3 / max(products[worst].seconds, 1e-9) / 1e12
    verdict = "not right on every rank" if any(product.wrong for product in products) else "right on every rank"
    where = f"rank {worst} on {nodes[worst]}: {speed:.3g} TFLOP/s, {slowness[worst]:.2f} times the others' time"
    return Finding(f"matrix products {verdict}; the slowest, {where}", faults, warnings)


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
            started = _now(device)
            dist.all_reduce(message, group=group)
            seconds.append(_now(device) - started)
            wrong = wrong if torch.equal(message, expected) else "a wrong sum"
    except RuntimeError as error:  # raised by gloo and NCCL where a connection fails
        return Link(f"failed ({str(error).splitlines()[0]})", 0.0)
    sent_bytes = 2 * (size - 1) / size * MESSAGE_BYTES[device.type]
    return Link(wrong, sent_bytes / statistics.median(seconds[1:]) / 1e9)  # the first opens the connections


def judge_all_reduce(
    kind: str, links: Sequence[Link], groups: Sequence[Sequence[int]], nodes: Sequence[str], min_gb_per_s: float
) -> Finding:
    """Judges the links of all ranks, whose `groups` of a `kind` were measured at the same time, as training does."""
    faults = []
    for group in groups:
        where = f"all-reduce over the {kind} group of ranks {_join(group)} ({_join(_distinct(group, nodes))})"
        speed = min(links[rank].gb_per_s for rank in group)
        if wrong := [rank for rank in group if links[rank].wrong is not None]:
            on = _join([f"{rank} ({nodes[rank]})" for rank in wrong])
            what = links[wrong[0]].wrong
            text = f"{where}: {what} on rank(s) {on}; exclude the nodes of the group one after the other"
            faults.append(Fault(text, passing=True))
        elif speed < min_gb_per_s:
            text = f"{where}: {speed:.3g} GB/s, expected at least {min_gb_per_s:g} (preflight.min_gb_per_s)"
            advice = "check the network between these nodes, and NETWORK_INTERFACE in slurm/site.env"
            faults.append(Fault(f"{text}; {advice}", passing=True))
    slow = min(groups, key=lambda group: min(links[rank].gb_per_s for rank in group))
    speed = min(links[rank].gb_per_s for rank in slow)
    reach = "within a node" if all(len(_distinct(group, nodes)) == 1 for group in groups) else "across nodes"
    measured = f"{kind} all-reduce over {len(slow)} ranks {reach}: {speed:.3g} GB/s"
    return Finding(f"{measured} (the slowest group: ranks {_join(slow)})", faults)


def _distinct(group: Sequence[int], nodes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(nodes[rank] for rank in group))


def _join(items: Sequence[object], most: int = 8) -> str:
    """The first few of `items`."""
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown}, … ({len(items)})"
