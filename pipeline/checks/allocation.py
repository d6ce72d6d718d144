"""All checks of an allocation before the first step: devices, links, memory, disk, and identical files on all nodes.

The functions named `judge_...` are pure; the others must be called by every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checks.devices import (
    Fault,
    Finding,
    Ranks,
    check_all_reduce,
    check_products,
    describe_ranks,
    device_memory,
    gather_ranks,
    host_memory,
    refuse_faults,
)
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.corpora import has_heldout, heldout_folder, train_folder
from pipeline.data.token_corpus import MANIFEST, SAMPLED_BLOCKS, TokenCorpus
from pipeline.data.tokenizer import tokenizer_file
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import DataError, PreflightError
from pipeline.files import free_bytes, read_bytes, sync
from pipeline.model.base_folder import BaseFolder
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.scale import expansion as expansions
from pipeline.sizing.cluster import GIB, USABLE_FRACTION, Cluster
from pipeline.sizing.estimate import Estimator
from pipeline.sizing.memory import checkpoints_bytes, held_bytes, no_room

_logger = log.get_logger(__name__)


def check_allocation(
    config: RunConfig,
    deepspeed_config: DeepSpeedConfig,
    base: BaseFolder,
    groups: ProcessGroups,
    device: torch.device,
) -> None:
    """Checks the allocation; every rank must call it, before it allocates anything.

    Raises:
        PreflightError: with all faults, on rank 0.
        SystemExit: on the other ranks.
    """
    if not config.preflight.enabled:
        return
    started = time.perf_counter()
    findings = []
    for finding in _findings(config, deepspeed_config, base, groups, device):
        _logger.info("preflight: %s", finding.measured)
        for warning in finding.warnings:
            _logger.warning("preflight: %s", warning)
        findings.append(finding)
    run_on_all_ranks(lambda: refuse_faults(findings))
    _logger.info("preflight: passed after %.1f s", time.perf_counter() - started)


def _findings(
    config: RunConfig,
    deepspeed_config: DeepSpeedConfig,
    base: BaseFolder,
    groups: ProcessGroups,
    device: torch.device,
) -> Iterator[Finding]:
    settings, layout = config.preflight, groups.layout
    ranks = gather_ranks()
    yield describe_ranks(ranks)
    floor = settings.min_gb_per_s_on(device.type)
    tp_group, dp_group = groups.get_model_parallel_group(), groups.get_data_parallel_group()
    yield check_all_reduce("tensor-parallel", tp_group, layout.tp_groups(), ranks, device, floor)
    yield check_all_reduce("data-parallel", dp_group, layout.dp_groups(), ranks, device, floor)
    yield check_products(ranks, deepspeed_config.dtype, device, settings.slow_factor)
    yield check_same_files(config, base, ranks)
    yield check_corpora(config, ranks)
    need, disk_bytes = broadcast_from_rank0(lambda: _needs(config, deepspeed_config, base, ranks))
    yield check_memory(need, ranks, device)
    yield check_disk(config.folder / "checkpoints", disk_bytes, ranks)


def _needs(config: RunConfig, deepspeed_config: DeepSpeedConfig, base: BaseFolder, ranks: Ranks) -> tuple[Need, int]:
    """The estimate: bytes of memory per rank, and bytes on disk for all checkpoints."""
    cluster = Cluster(len(ranks.nodes), gpus_per_node=ranks.count_on_node)
    estimator = Estimator(config, base.spec, deepspeed_config, cluster)
    memory, host_bytes = estimator.memory(estimator.own_choice)
    disk_bytes = checkpoints_bytes(config, estimator.parameters)
    return Need(memory.total, host_bytes), disk_bytes


# --- Memory: what the estimate needs, and what devices and hosts have ------------------------------------------------


class Need(NamedTuple):
    """Bytes that a rank will hold on its GPU and in host memory; without GPUs all is in host memory."""

    device: int
    host: int


class Room(NamedTuple):
    """Bytes available to a rank: free on its GPU, usable there at most, and its share of the node's free memory."""

    free: int
    usable: int
    host: int


def measure_room(ranks: Ranks, device: torch.device) -> Room:
    """The room on this rank's device and node."""
    host = int(host_memory() * USABLE_FRACTION) // ranks.count_on_node
    if device.type != "cuda":
        return Room(host, host, host)
    free, total = device_memory(device)
    return Room(free, int(total * USABLE_FRACTION), host)


def check_memory(need: Need, ranks: Ranks, device: torch.device) -> Finding:
    """Compares `need` with every rank's room."""
    rooms: list[Room] = [Room(0, 0, 0)] * len(ranks.nodes)
    dist.all_gather_object(rooms, run_on_all_ranks(lambda: measure_room(ranks, device)))
    on_gpu = device.type == "cuda"
    return judge_memory(need if on_gpu else Need(0, need.device + need.host), rooms, ranks)


def judge_memory(need: Need, rooms: Sequence[Room], ranks: Ranks) -> Finding:
    """Judges `rooms`, by rank."""
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


# --- Disk: room for the checkpoints, in a folder that all nodes share ------------------------------------------------

PATIENCE_S = 10.0
"""How long a network file system may take to show a node the files of another."""


class FolderAccess(NamedTuple):
    """A node's access to the folder: why it cannot write, the free bytes, and the name of the file that it wrote."""

    fault: str | None
    free_bytes: int
    written: str


def check_disk(folder: Path, needed_bytes: int, ranks: Ranks) -> Finding:
    """Writes a small file from every node, and waits until every node sees the files of the others.

    `needed_bytes` is the total that `folder` will hold. Free space is statvfs's, which respects quotas on some file
    systems only.
    """
    own = _write_probe(folder) if ranks.is_first_on_node else None
    folders: list[FolderAccess | None] = [None] * len(ranks.nodes)
    dist.all_gather_object(folders, own)
    names = [found.written for found in folders if found is not None and found.fault is None]
    unseen: list[list[str]] = [[]] * len(ranks.nodes)
    writes = own is not None and own.fault is None
    dist.all_gather_object(unseen, run_on_all_ranks(lambda: _unseen(folder, names) if writes else []))
    if own is not None:
        with contextlib.suppress(OSError):  # reported already
            (folder / own.written).unlink(missing_ok=True)
    held = broadcast_from_rank0(lambda: held_bytes(folder))
    return judge_disk(folder, folders, unseen, held, needed_bytes, ranks)


def judge_disk(
    folder: Path,
    folders: Sequence[FolderAccess | None],
    unseen: Sequence[Sequence[str]],
    held_bytes: int,
    needed_bytes: int,
    ranks: Ranks,
) -> Finding:
    """Judges the nodes' access, by rank, where `held_bytes` of the `needed_bytes` are already written.

    If the run has already saved, a full disk is a passing fault: other users filled it and may make room.
    """
    faults, passing = [], held_bytes > 0
    more_bytes = max(0, needed_bytes - held_bytes)
    accesses = [(ranks.nodes[rank], found) for rank, found in enumerate(folders) if found is not None]
    for node, found in accesses:
        if found.fault is not None:
            faults.append(Fault(f"{folder}: {node} cannot write there: {found.fault}", passing=passing))
    for rank, names in enumerate(unseen):
        if names:
            writers = ", ".join(node for node, found in accesses if found.written in names)
            faults.append(
                Fault(
                    f"{folder}: {ranks.nodes[rank]} does not see what {writers} wrote there; set folder to a file "
                    "system that all nodes share"
                )
            )
    free = min((found.free_bytes for _, found in accesses if found.fault is None), default=0)
    if free < more_bytes and not faults:
        faults.append(Fault(str(no_room(folder, more_bytes, free)), passing=passing))
    return Finding(
        f"{folder}: {free / 1e9:.3g} GB free, checkpoints need {more_bytes / 1e9:.3g} GB more", tuple(faults)
    )


def _write_probe(folder: Path) -> FolderAccess:
    name = f".preflight.{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.write(b"preflight\n")
            file.flush()
            os.fsync(file.fileno())
        sync(folder)
        return FolderAccess(None, free_bytes(folder), name)
    except OSError as error:
        return FolderAccess(error.strerror or str(error), 0, name)


def _unseen(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of `names` that are still missing after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while missing := [name for name in names if not (folder / name).exists()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return missing


# --- Identical files on all nodes: base, tokenizer, initial expansion, corpora --------------------------------------
# Small files are hashed whole. Of the base's weights, which may be hundreds of GB, each node hashes blocks spread
# evenly over every file, including its header and its end. That detects another model, another version, and a file that
# was cut short or half copied; not a flipped byte between the blocks. Every byte is hashed later, on one node's files.

BLOCK_BYTES = 4096
BLOCKS = 512
"""Over all weight files; at least two in each."""

Digests = Mapping[str, str]


def sampled_hash(path: Path, blocks: int) -> str:
    """A hash of a file's size and of `blocks` of its blocks, the first and the last included."""
    size = path.stat().st_size
    last = max(0, size - BLOCK_BYTES)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(last * number // max(1, blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digests(config: RunConfig, base: BaseFolder) -> dict[str, str]:
    """The hashes of the files on this node, by name."""
    weights = sorted(set(base.file_of.values()))
    seen = {str(file): sampled_hash(file, max(2, BLOCKS // len(weights))) for file in weights}
    for file in _small_files(config):
        try:
            seen[str(file)] = hashlib.sha256(read_bytes(file, PreflightError)).hexdigest()
        except FileNotFoundError:
            seen[str(file)] = "missing"
    return seen


def _small_files(config: RunConfig) -> Iterator[Path]:
    yield config.base / "config.json"
    yield tokenizer_file(config.tokenizer)
    if isinstance(config.method, ScaleMethod):
        yield config.upscaled_folder / expansions.MANIFEST
    for name in config.data.corpora:
        yield train_folder(config.data, name) / MANIFEST
        yield heldout_folder(config.data, name) / MANIFEST


def check_same_files(config: RunConfig, base: BaseFolder, ranks: Ranks) -> Finding:
    """Compares the hashes of all nodes."""
    seen: list[Digests | None] = [None] * len(ranks.nodes)
    own = run_on_all_ranks(lambda: digests(config, base) if ranks.is_first_on_node else None)
    dist.all_gather_object(seen, own)
    return judge_same_files(seen, ranks)


def judge_same_files(seen: Sequence[Digests | None], ranks: Ranks) -> Finding:
    """Compares the hashes in `seen`, by rank, with the first node's."""
    by_node = {node: seen[first] or {} for node, first in ranks.first_rank_of.items()}
    reference_node, reference = next(iter(by_node.items()))
    faults = tuple(
        Fault(
            f"{name}: differs between {node} and {reference_node}; every node must read the same file: copy it there "
            "again, or use a file system that all nodes share"
        )
        for node, own in by_node.items()
        for name in sorted({*reference, *own})
        if own.get(name) != reference.get(name)
    )
    result = "differ between nodes" if faults else f"are the same on {len(by_node)} node(s)"
    return Finding(f"base (sizes, headers and sampled blocks), tokenizer, expansion and corpora {result}", faults)


# --- Corpora: their files are those that were written ----------------------------------------------------------------


def check_corpora(config: RunConfig, ranks: Ranks) -> Finding:
    """Compares the corpora's sizes, indexes and some of their tokens with their manifests; each rank does its share."""
    folders = [train_folder(config.data, name) for name in config.data.corpora]
    folders += [heldout_folder(config.data, name) for name in config.data.corpora if has_heldout(config.data, name)]
    folders = [folder for folder in folders if (folder / MANIFEST).exists()]  # check_same_files finds missing ones
    world_size = len(ranks.nodes)
    share, blocks = (dist.get_rank(), world_size), math.ceil(SAMPLED_BLOCKS / world_size / max(1, len(folders)))
    faults: list[list[str]] = [[]] * world_size
    dist.all_gather_object(faults, run_on_all_ranks(lambda: _damage(folders, blocks, share)))
    damage = [Fault(f"{fault} (seen on {ranks.nodes[rank]})") for rank, own in enumerate(faults) for fault in own]
    result = "are damaged" if damage else "are those that were written"
    return Finding(f"corpora: sizes, indexes and up to {SAMPLED_BLOCKS} blocks of tokens {result}", tuple(damage))


def _damage(folders: Sequence[Path], blocks: int, share: tuple[int, int]) -> list[str]:
    faults = []
    for folder in folders:
        try:
            TokenCorpus(folder).check(blocks=blocks, share=share)
        except DataError as error:
            faults.append(str(error))
    return faults
