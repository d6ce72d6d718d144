"""What the estimate says that a rank needs, and what its GPU and its node have free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks
from pipeline.sizing.cluster import GIB, USABLE_FRACTION
from pipeline.sizing.host_memory import available_memory
from pipeline.sizing.meta_device import NotTracedError


class AvailableMemory(NamedTuple):
    """The bytes available to a rank."""

    free: int
    """Free on its GPU."""
    usable: int
    """Usable on its GPU at most."""
    host: int
    """The rank's share of the free memory of its node."""


def check_memory(allocation: Allocation) -> Finding:
    """The estimate fits into every rank's memory; without GPUs all of it is host memory."""
    on_gpu = allocation.device.type == "cuda"

    def needed() -> tuple[int, int] | None:
        """The bytes on a GPU, and in host memory; None where they cannot be estimated."""
        estimator = allocation.estimator()
        try:
            memory, host_bytes = estimator.memory(estimator.own_choice)
        except NotTracedError:
            return None
        if on_gpu:
            return memory.total, host_bytes
        return 0, memory.total + host_bytes

    def available() -> AvailableMemory:
        free = 0
        total = 0
        if on_gpu:
            # The driver's figures include the memory of other processes; torch's own do not.
            free, total = torch.cuda.mem_get_info(allocation.device)
        # All ranks of a node share its memory, and measure it at the same time.
        host = int(available_memory() * USABLE_FRACTION) // allocation.ranks_on_node
        return AvailableMemory(int(free), int(total * USABLE_FRACTION), host)

    bytes_of_rank = broadcast_from_rank0(needed)
    if bytes_of_rank is None:
        return Finding("memory is not estimated for this hosted base (scale-cpt train --dry-run)")
    device_bytes, host_bytes = bytes_of_rank
    by_rank = all_gathered(run_on_all_ranks(available))
    return judge_memory(device_bytes, host_bytes, by_rank, allocation.nodes)


def judge_memory(
    device_bytes: int, host_bytes: int, available: Sequence[AvailableMemory], nodes: Sequence[str]
) -> Finding:
    """Judges a rank's needs, on its GPU and in host memory, by what each rank has available."""
    faults: list[Fault] = []
    needed = _gib(device_bytes)
    smallest = min(range(len(nodes)), key=lambda rank: available[rank].usable)
    usable = available[smallest].usable
    if device_bytes > usable:
        faults.append(
            Fault(
                f"a rank needs {needed} of the {_gib(usable)} GiB that are usable on a GPU of "
                f"{nodes[smallest]}; scale-cpt estimate recommends a layout that fits"
            )
        )
    else:
        for rank, memory in enumerate(available):
            if device_bytes > memory.free:
                text = (
                    f"rank {rank} on {nodes[rank]}: {_gib(memory.free)} GiB of its GPU are free, "
                    f"expected {needed}: another process holds the rest"
                )
                faults.append(Fault(text, nodes[rank], transient=True))
    fullest = min(range(len(nodes)), key=lambda rank: available[rank].host)
    host = available[fullest].host
    if host_bytes > host:
        faults.append(
            Fault(
                f"a rank needs {_gib(host_bytes)} GiB of host memory, found {_gib(host)} for each "
                f"rank on {nodes[fullest]}; start fewer ranks a node, or ask Slurm for more (--mem)"
            )
        )
    measured: list[str] = []
    if device_bytes:
        measured.append(f"{needed} of {_gib(usable)} usable GiB on a GPU")
    if host_bytes:
        measured.append(f"{_gib(host_bytes)} of {_gib(host)} GiB of host memory")
    return Finding(f"a rank needs {' and '.join(measured)}", faults)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"
