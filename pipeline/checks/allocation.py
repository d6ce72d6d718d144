"""Memory, disk and files of an allocation before the first step. Every rank calls these checks together."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from pipeline.checks.devices import Fault, Finding
from pipeline.checks.inputs import Inputs
from pipeline.config.method import ScaleMethod
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES
from pipeline.data.tokenize.corpora import heldout_folder, train_folder
from pipeline.data.tokenizer.load import tokenizer_file
from pipeline.errors import DataError
from pipeline.expansion_folder import MANIFEST as EXPANSION_MANIFEST
from pipeline.files import file_hash, free_bytes, held_bytes, sampled_hash, write_text
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.sizing.cluster import GIB, USABLE_FRACTION, Cluster
from pipeline.sizing.memory import checkpoints_bytes, no_room

if TYPE_CHECKING:
    from pipeline.sizing.estimate import Estimator


@dataclass(frozen=True)
class Allocation:
    """The ranks that are to train a run; `nodes` holds the node of every rank, by rank, under its Slurm name."""

    inputs: Inputs
    groups: ProcessGroups
    device: torch.device
    nodes: list[str]

    @property
    def first_ranks(self) -> list[int]:
        """The lowest rank of each node."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]

    @property
    def is_first_on_node(self) -> bool:
        return dist.get_rank() in self.first_ranks

    @property
    def ranks_here(self) -> int:
        return self.nodes.count(self.nodes[dist.get_rank()])

    def estimator(self) -> Estimator:
        """The estimate of the run's own layout."""
        from pipeline.sizing.estimate import (
            Estimator,
        )  # its imports take seconds, and every stage reads this module

        cluster = Cluster(len(self.nodes), gpus_per_node=self.ranks_here)
        return Estimator(
            self.inputs.config, self.inputs.base.spec, self.inputs.deepspeed_config, cluster
        )


# --- Memory: what the estimate needs, and what devices and hosts have ------------------------------------------------


class Room(NamedTuple):
    """Bytes available to a rank: free on its GPU, usable there at most, and its share of the node's free memory."""

    free: int
    usable: int
    host: int


def check_memory(run: Allocation) -> Finding:
    """Compares the estimate with every rank's room; without GPUs all is in host memory."""
    on_gpu = run.device.type == "cuda"

    def needed() -> tuple[int, int]:
        estimator = run.estimator()
        memory, host_bytes = estimator.memory(estimator.own_choice)
        return (memory.total, host_bytes) if on_gpu else (0, memory.total + host_bytes)

    def available() -> Room:
        free, total = torch.cuda.mem_get_info(run.device) if on_gpu else (0, 0)
        host = int(host_memory() * USABLE_FRACTION) // run.ranks_here
        return Room(int(free), int(total * USABLE_FRACTION), host)

    device_bytes, host_bytes = broadcast_from_rank0(needed)
    return judge_memory(
        device_bytes, host_bytes, all_gathered(run_on_all_ranks(available)), run.nodes
    )


def judge_memory(
    device_bytes: int, host_bytes: int, rooms: Sequence[Room], nodes: Sequence[str]
) -> Finding:
    """Judges `rooms`, by rank, for a rank that needs so much on its GPU and of its host."""
    faults, on_gpu, on_host = [], _gib(device_bytes), _gib(host_bytes)
    usable, small = min((room.usable, node) for room, node in zip(rooms, nodes, strict=True))
    host, tight = min((room.host, node) for room, node in zip(rooms, nodes, strict=True))
    if device_bytes > usable:
        found = (
            f"a rank needs {on_gpu} of the {_gib(usable)} GiB that are usable on a GPU of {small}"
        )
        faults.append(Fault(f"{found}; scale-cpt estimate recommends a layout that fits"))
    else:
        faults += [
            Fault(
                f"rank {rank} on {nodes[rank]}: {_gib(room.free)} GiB of its GPU are free, expected {on_gpu}: another "
                "process holds the rest",
                nodes[rank],
                passing=True,
            )
            for rank, room in enumerate(rooms)
            if device_bytes > room.free
        ]
    if host_bytes > host:
        found = f"a rank needs {on_host} GiB of host memory, found {_gib(host)} for each rank on {tight}"
        faults.append(Fault(f"{found}; start fewer ranks a node, or ask Slurm for more (--mem)"))
    measured = [f"{on_gpu} of {_gib(usable)} usable GiB on a GPU"] if device_bytes else []
    measured += [f"{on_host} of {_gib(host)} GiB of host memory"] if host_bytes else []
    return Finding(f"a rank needs {' and '.join(measured)}", faults)


def host_memory() -> int:
    """Bytes that this node's processes may still take: Linux's MemAvailable, within the job's control groups (v2)."""
    lines = (
        line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    bounds = [next(int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:")]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if line.startswith("0::"):
            group = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
            files = (folder / "memory.max" for folder in (group, *group.parents))
            limits = (file.read_text(encoding="ascii").strip() for file in files if file.is_file())
            bounds += [int(limit) for limit in limits if limit != "max"]
    return min(bounds)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


# --- Disk: room for the checkpoints, in a folder that all nodes share ------------------------------------------------

PATIENCE_S = 10.0
"""How long a network file system may take to show a node the files of another."""


def check_disk(run: Allocation) -> Finding:
    """Writes a small file from every node, and waits until every node sees the files of the others.

    Free space is statvfs's, which respects quotas on some file systems only. If the run has already saved, a full disk
    is a passing fault: other users filled it and may make room.
    """
    folder, nodes = run.inputs.config.checkpoint_folder, run.nodes
    probe = folder / f".preflight.{uuid.uuid4().hex}"
    refusals = all_gathered(_why_not_written(probe) if run.is_first_on_node else None)
    names = all_gathered(probe.name)
    writer_of = {names[rank]: nodes[rank] for rank in run.first_ranks if refusals[rank] is None}
    unseen = all_gathered(
        run_on_all_ranks(lambda: _unseen(folder, [*writer_of]) if run.is_first_on_node else [])
    )
    with contextlib.suppress(OSError):  # it was not written
        probe.unlink()

    def measure() -> tuple[int, int, int]:
        return (
            checkpoints_bytes(run.inputs.config, run.estimator().parameters),
            held_bytes(folder),
            free_bytes(folder),
        )

    needed, held, free = broadcast_from_rank0(measure)
    more = max(0, needed - held)
    faults = []
    for node, refusal, missing in zip(nodes, refusals, unseen, strict=True):
        if refusal is not None:
            faults.append(
                Fault(f"{folder}: {node} cannot write there: {refusal}", passing=held > 0)
            )
        if missing:
            found = f"{node} does not see what {', '.join(writer_of[name] for name in missing)} wrote there"
            faults.append(
                Fault(f"{folder}: {found}; set folder to a file system that all nodes share")
            )
    if free < more and not faults:
        faults.append(Fault(str(no_room(folder, more, free)), passing=held > 0))
    return Finding(
        f"{folder}: {free / 1e9:.3g} GB free, checkpoints need {more / 1e9:.3g} GB more", faults
    )


def _why_not_written(probe: Path) -> str | None:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        write_text(probe, "preflight\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unseen(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of `names` that are still missing after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while (
        missing := [name for name in names if not (folder / name).exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    return missing


# --- Identical files on all nodes: base, tokenizer, initial expansion, corpora --------------------------------------
# Small files are hashed whole. Of the base's weights, which may be hundreds of GB, each node hashes blocks spread
# evenly over every file, including its header and its end. That detects another model, another version, and a file that
# was cut short or half copied; not a flipped byte between the blocks. Every byte is hashed later, on one node's files.

BLOCKS = 512
"""Over all weight files; at least two in each."""


def check_same_files(run: Allocation) -> Finding:
    """Compares the hashes of every node's files with the first node's."""
    seen = all_gathered(
        run_on_all_ranks(lambda: _hashes(run.inputs) if run.is_first_on_node else {})
    )
    advice = "every node must read the same file: copy it there again, or use a file system that all nodes share"
    faults = [
        Fault(f"{name}: differs between {run.nodes[rank]} and {run.nodes[0]}; {advice}")
        for rank in run.first_ranks
        for name in sorted({*seen[0], *seen[rank]})
        if seen[rank].get(name) != seen[0].get(name)
    ]
    result = "differ between nodes" if faults else f"are the same on {len(run.first_ranks)} node(s)"
    return Finding(
        f"base (sizes, headers and sampled blocks), tokenizer, expansion and corpora {result}",
        faults,
    )


def _hashes(inputs: Inputs) -> dict[str, str]:
    """The hashes of the files on this node, by name."""
    config, weights = inputs.config, inputs.base.files
    small = [config.base / "config.json", tokenizer_file(config.tokenizer)]
    if isinstance(config.method, ScaleMethod):
        small.append(config.initial_expansion_folder / EXPANSION_MANIFEST)
    for name in config.data.corpora:
        small += [folder(config.data, name) / MANIFEST for folder in (train_folder, heldout_folder)]
    seen = {str(file): sampled_hash(file, max(2, BLOCKS // len(weights))) for file in weights}
    return seen | {str(file): file_hash(file) if file.exists() else "missing" for file in small}


def check_corpora(run: Allocation) -> Finding:
    """Compares the corpora's sizes, indexes and some of their tokens with their manifests; each rank does its share."""
    corpora, nodes = run.inputs.samples.corpora, run.nodes
    sampled = SAMPLED_BYTES // len(nodes) // max(1, len(corpora))

    def damaged() -> list[str]:
        found = []
        for corpus in corpora:
            try:
                corpus.check(sampled=sampled, share=(dist.get_rank(), len(nodes)))
            except DataError as error:
                found.append(str(error))
        return found

    seen = all_gathered(run_on_all_ranks(damaged))
    faults = [
        Fault(f"{fault} (seen on {nodes[rank]})") for rank, own in enumerate(seen) for fault in own
    ]
    result = "are damaged" if faults else "are those that were written"
    return Finding(
        f"corpora: sizes, indexes and {SAMPLED_BYTES // 2**20} MiB of tokens {result}", faults
    )
