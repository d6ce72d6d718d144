"""Whether a sum over ranks comes out right, and how fast: within tensor-parallel and within data-parallel groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.training.preflight.devices import wait_for
from pipeline.training.preflight.finding import Fault, Finding
from pipeline.training.preflight.ranks import Ranks

MESSAGE_BYTES = {"cuda": 64 * 2**20, "cpu": 2 * 2**20}
REPEATS = 5
_DISTINCT = 13
"""The summands are below this, so that 32 bits hold their sum over any number of ranks there is."""


class Link(NamedTuple):
    """What one rank saw of its group's all-reduce: what went wrong, if anything, and what each rank of a ring sends in
    a second."""

    wrong: str | None
    gb_per_s: float


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Sums a known tensor over `group`, a few times; each of its ranks must call it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    pattern = torch.arange(MESSAGE_BYTES[device.type] // 4, dtype=torch.int32, device=device) % _DISTINCT
    expected = pattern * (size * (size + 1) // 2)
    wrong, seconds = None, []
    try:
        for _ in range(1 + REPEATS):
            message = pattern * (rank + 1)
            dist.barrier(group)
            wait_for(device)
            started = time.perf_counter()
            dist.all_reduce(message, group=group)
            wait_for(device)
            seconds.append(time.perf_counter() - started)
            wrong = wrong if torch.equal(message, expected) else "a wrong sum"
    except RuntimeError as error:  # what gloo and NCCL raise where a connection fails
        return Link(f"failed ({str(error).splitlines()[0]})", 0.0)
    sent_bytes = 2 * (size - 1) / size * MESSAGE_BYTES[device.type]
    return Link(wrong, sent_bytes / statistics.median(seconds[1:]) / 1e9)  # the first opens the connections


def check_messages(
    kind: str,
    group: dist.ProcessGroup,
    members: Sequence[Sequence[int]],
    ranks: Ranks,
    device: torch.device,
    min_gb_per_s: float,
) -> Finding:
    """Measures all groups of one `kind` at once, as training uses them; `members` are the ranks of each.

    Every rank must call it.
    """
    if len(members[0]) == 1:
        return Finding(f"no {kind} messages: a group is one rank")
    links: list[Link] = [Link(None, 0.0)] * len(ranks.nodes)
    dist.all_gather_object(links, measure_all_reduce(group, device))
    return judge_messages(kind, links, members, ranks, min_gb_per_s)


def judge_messages(
    kind: str, links: Sequence[Link], members: Sequence[Sequence[int]], ranks: Ranks, min_gb_per_s: float
) -> Finding:
    """What the ranks' `links`, by rank, say."""
    faults = []
    for group in members:
        where = f"all-reduce over the {kind} group of ranks {_listed(group)} ({_listed(ranks.among(group))})"
        if wrong := [rank for rank in group if links[rank].wrong is not None]:
            on = _listed([f"{rank} ({ranks.nodes[rank]})" for rank in wrong])
            what = links[wrong[0]].wrong
            text = f"{where}: {what} on rank(s) {on}; leave out one node of the group after the other"
            faults.append(Fault(text, passing=True))
        elif (slowest := min(links[rank].gb_per_s for rank in group)) < min_gb_per_s:
            faults.append(
                Fault(
                    f"{where}: {slowest:.3g} GB/s, expected at least {min_gb_per_s:g} (preflight.min_gb_per_s); look "
                    "at the network between these nodes, and at NETWORK_INTERFACE in slurm/site.env",
                    passing=True,
                )
            )
    slow = min(members, key=lambda group: min(links[rank].gb_per_s for rank in group))
    speed = min(links[rank].gb_per_s for rank in slow)
    reach = "within a node" if all(len(ranks.among(group)) == 1 for group in members) else "across nodes"
    slowest_group = f"the slowest group: ranks {_listed(slow)}"
    return Finding(
        f"{kind} all-reduce over {len(slow)} ranks {reach}: {speed:.3g} GB/s ({slowest_group})", tuple(faults)
    )


def _listed(items: Sequence[object], most: int = 8) -> str:
    """The first few of `items`."""
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown}, … ({len(items)})"
