"""Sums over the ranks before the first step: right, and fast enough, in each kind of group."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.clock import time_on
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.parallel.ranks import all_gathered

_MIN_GB_PER_S = {"cuda": 0.5, "cpu": 0.001}
"""The default of preflight.min_gb_per_s, by the type of device."""
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


def check_tensor_parallel_all_reduce(allocation: Allocation) -> Finding:
    """Sums over each tensor-parallel group are right, and as fast as preflight.min_gb_per_s.

    Every rank calls it. All groups send at the same time, as in training.
    """
    group = allocation.groups.get_model_parallel_group()
    groups = allocation.groups.layout.tp_groups()
    return _check_all_reduce(allocation, "tensor-parallel", group, groups)


def check_data_parallel_all_reduce(allocation: Allocation) -> Finding:
    """Sums over each data-parallel group are right, and as fast as preflight.min_gb_per_s.

    Every rank calls it. All groups send at the same time, as in training.
    """
    group = allocation.groups.get_data_parallel_group()
    groups = allocation.groups.layout.dp_groups()
    return _check_all_reduce(allocation, "data-parallel", group, groups)


def _check_all_reduce(
    allocation: Allocation, kind: str, group: dist.ProcessGroup, groups: Sequence[Sequence[int]]
) -> Finding:
    """Measures this rank's `group`, one of the `groups` of a kind, while the others do theirs."""
    if len(groups[0]) == 1:
        return Finding(f"no {kind} all-reduce: a group is one rank")
    min_gb_per_s = allocation.inputs.config.preflight.min_gb_per_s
    if min_gb_per_s is None:
        min_gb_per_s = _MIN_GB_PER_S[allocation.device.type]
    links = all_gathered(measure_all_reduce(group, allocation.device))
    return judge_all_reduce(kind, links, groups, allocation.nodes, min_gb_per_s)


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
            started = time_on(device)
            dist.all_reduce(message, group=group)
            seconds.append(time_on(device) - started)
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
        faults.append(Fault(f"all-reduce over {where}: {found}; {advice}", transient=True))
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
