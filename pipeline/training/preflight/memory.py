"""Whether the estimate of a run's memory fits the devices, or the hosts, that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.estimation.cluster import GIB, USABLE_FRACTION
from pipeline.training.preflight.devices import device_memory, host_memory
from pipeline.training.preflight.finding import Fault, Finding
from pipeline.training.preflight.ranks import Ranks
from pipeline.training.unison import in_unison


class Need(NamedTuple):
    """Bytes that a rank will hold: on its GPU, and in its host's memory. Without GPUs all is in the host's."""

    device: int
    host: int


class Room(NamedTuple):
    """Bytes that a rank finds: free on its GPU, of how many usable; and its share of the free memory of its node."""

    free: int
    usable: int
    host: int


def measure_room(ranks: Ranks, device: torch.device) -> Room:
    """What there is on this rank's device and node."""
    host = int(host_memory() * USABLE_FRACTION) // ranks.on_this_node
    if device.type != "cuda":
        return Room(host, host, host)
    free, total = device_memory(device)
    return Room(free, int(total * USABLE_FRACTION), host)


def check_memory(need: Need, ranks: Ranks, device: torch.device) -> Finding:
    """Compares `need` with every rank's room; every rank must call it."""
    rooms: list[Room] = [Room(0, 0, 0)] * len(ranks.nodes)
    dist.all_gather_object(rooms, in_unison(lambda: measure_room(ranks, device)))
    on_gpu = device.type == "cuda"
    return judge_memory(need if on_gpu else Need(0, need.device + need.host), rooms, ranks)


def judge_memory(need: Need, rooms: Sequence[Room], ranks: Ranks) -> Finding:
    """What the ranks' `rooms`, by rank, say."""
    faults = []
    smallest = min(range(len(rooms)), key=lambda rank: rooms[rank].usable)
    if need.device > rooms[smallest].usable:
        faults.append(
            Fault(
                f"a rank needs {_gib(need.device)} of the {_gib(rooms[smallest].usable)} GiB that are usable on a GPU "
                f"of {ranks.nodes[smallest]}; tools/estimate.py recommends a layout that fits"
            )
        )
    else:
        faults += [
            Fault(
                f"rank {rank} on {ranks.nodes[rank]}: {_gib(room.free)} GiB of its GPU are free, expected "
                f"{_gib(need.device)}: another process holds the rest",
                ranks.nodes[rank],
                passing=True,
            )
            for rank, room in enumerate(rooms)
            if need.device > room.free
        ]
    tightest = min(range(len(rooms)), key=lambda rank: rooms[rank].host)
    if need.host > rooms[tightest].host:
        faults.append(
            Fault(
                f"a rank needs {_gib(need.host)} GiB of host memory, found {_gib(rooms[tightest].host)} for each rank "
                f"on {ranks.nodes[tightest]}; start fewer ranks a node, or ask Slurm for more (--mem)"
            )
        )
    measured = []
    if need.device:
        measured.append(f"{_gib(need.device)} of {_gib(rooms[smallest].usable)} usable GiB on a GPU")
    if need.host:
        measured.append(f"{_gib(need.host)} of {_gib(rooms[tightest].host)} GiB of host memory")
    return Finding(f"a rank needs {' and '.join(measured)}", tuple(faults))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"
