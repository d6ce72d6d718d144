"""The preflight's checks of an allocation: links, processors, memory, disk and files.

Every rank calls each check, at the same time as the others. A check returns the same finding on all
ranks.
"""

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

from pipeline.checks.devices import (
    Fault,
    Finding,
    judge_all_reduce,
    judge_products,
    measure_all_reduce,
    measure_product,
)
from pipeline.checks.inputs import RunInputs
from pipeline.config.method import starts_from_expansion
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES
from pipeline.data.tokenize.corpora import heldout_folder, train_folder
from pipeline.data.tokenizer.tokenizer_file import tokenizer_file
from pipeline.errors import DataError
from pipeline.expansion_folder import MANIFEST as EXPANSION_MANIFEST
from pipeline.files.disk_space import free_bytes, held_bytes
from pipeline.files.hashes import file_hash, sampled_hash
from pipeline.files.publishing import write_text
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.sizing.checkpoints import checkpoints_bytes, no_room
from pipeline.sizing.cluster import GIB, USABLE_FRACTION, Cluster
from pipeline.sizing.meta_device import NotTracedError

if TYPE_CHECKING:
    from pipeline.sizing.estimate import Estimator


@dataclass(frozen=True)
class Allocation:
    """The ranks that are to train a run.

    Args:
        inputs: What the run reads.
        groups: The process groups of the ranks.
        device: This rank's device.
        nodes: The Slurm name of every rank's node, by rank.
    """

    inputs: RunInputs
    groups: ProcessGroups
    device: torch.device
    nodes: list[str]

    @property
    def first_ranks(self) -> list[int]:
        """The lowest rank of each node."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank is the lowest of its node."""
        return dist.get_rank() in self.first_ranks

    @property
    def ranks_on_node(self) -> int:
        """The number of ranks on this rank's node."""
        return self.nodes.count(self.nodes[dist.get_rank()])

    def estimator(self) -> Estimator:
        """The estimate of the run's own layout."""
        # Its imports take seconds, and every stage imports this module.
        from pipeline.sizing.estimate import estimator_of

        cluster = Cluster(len(self.nodes), gpus_per_node=self.ranks_on_node)
        return estimator_of(
            self.inputs.config, self.inputs.base.spec, self.inputs.deepspeed_config, cluster
        )


# --- Links and processors -------------------------------------------------------------------------

_MIN_GB_PER_S = {"cuda": 0.5, "cpu": 0.001}
"""The default of preflight.min_gb_per_s, by the type of device."""


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


def check_matrix_products(allocation: Allocation) -> Finding:
    """A matrix product is exact on every rank, and none is slower than preflight.slow_factor."""
    dtype = allocation.inputs.deepspeed_config.dtype
    products = all_gathered(measure_product(dtype, allocation.device))
    slow_factor = allocation.inputs.config.preflight.slow_factor
    return judge_products(products, allocation.nodes, allocation.device.type, slow_factor)


# --- Memory: what the estimate needs, and what devices and hosts have -----------------------------


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
        free, total = 0, 0
        if on_gpu:
            # The driver's figures include the memory of other processes; torch's own do not.
            free, total = torch.cuda.mem_get_info(allocation.device)
        # All ranks of a node share its memory, and measure it at the same time.
        host = int(host_memory() * USABLE_FRACTION) // allocation.ranks_on_node
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
                faults.append(Fault(text, nodes[rank], passing=True))
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


def host_memory() -> int:
    """The bytes that this node's processes may still take.

    Linux's MemAvailable, or less where a limit of the job's control groups (v2) is lower.
    """
    bounds: list[int] = []
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[0] == "MemAvailable:":
            bounds.append(int(fields[1]) * 1024)
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if not line.startswith("0::"):
            continue  # A hierarchy of version 1.
        group = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        for folder in (group, *group.parents):
            file = folder / "memory.max"
            limit = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
            if limit != "max":
                bounds.append(int(limit))
    return min(bounds)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


# --- Disk: space for the checkpoints, in a folder that all nodes share ----------------------------

PATIENCE_S = 10.0
"""How long a network file system may take to show a node the files of another."""


def check_disk(allocation: Allocation) -> Finding:
    """Every node can write the checkpoints' folder, sees what the others write, and it has space.

    Each node writes a small file, and waits until it sees the files of all others. Free space is
    statvfs's, which respects quotas on some file systems only. If the run has already saved, a full
    disk is a passing fault: other users filled it, and may make space.
    """
    folder = allocation.inputs.config.checkpoint_folder
    nodes = allocation.nodes
    probe = folder / f".preflight.{uuid.uuid4().hex}"
    refusal_here: str | None = None
    if allocation.is_first_on_node:
        refusal_here = _write_probe(probe)
    refusals = all_gathered(refusal_here)
    probes = all_gathered(probe.name)
    writers: dict[str, str] = {}
    for rank in allocation.first_ranks:
        if refusals[rank] is None:
            writers[probes[rank]] = nodes[rank]

    def unseen_here() -> list[str]:
        if not allocation.is_first_on_node:
            return []
        return _unseen(folder, list(writers))

    unseen = all_gathered(run_on_all_ranks(unseen_here))
    # Most ranks, and nodes that cannot write, have no file to remove.
    with contextlib.suppress(OSError):
        probe.unlink()

    def measure() -> tuple[int, int, int]:
        # Its imports take seconds, and every stage imports this module.
        from pipeline.sizing.parameters import parameters_of

        inputs = allocation.inputs
        parameters = parameters_of(inputs.config, inputs.base.spec)
        needed = checkpoints_bytes(inputs.config, parameters)
        return needed, held_bytes(folder), free_bytes(folder)

    needed, held, free = broadcast_from_rank0(measure)
    more = max(0, needed - held)
    has_saved = held > 0
    faults: list[Fault] = []
    for node, refusal, missing in zip(nodes, refusals, unseen, strict=True):
        if refusal is not None:
            faults.append(
                Fault(f"{folder}: {node} cannot write there: {refusal}", passing=has_saved)
            )
        if missing:
            others = ", ".join(writers[name] for name in missing)
            faults.append(
                Fault(
                    f"{folder}: {node} does not see what {others} wrote there; "
                    "set folder to a file system that all nodes share"
                )
            )
    if free < more and not faults:
        faults.append(Fault(str(no_room(folder, more, free)), passing=has_saved))
    measured = f"{free / 1e9:.3g} GB free, checkpoints need {more / 1e9:.3g} GB more"
    return Finding(f"{folder}: {measured}", faults)


def _write_probe(probe: Path) -> str | None:
    """Writes a small file. Returns the reason if that fails, and None if it does not."""
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        write_text(probe, "preflight\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unseen(folder: Path, names: Sequence[str]) -> list[str]:
    """The files that are still missing after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        missing = [name for name in names if not (folder / name).exists()]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(0.2)


# --- The same files on all nodes: base, tokenizer, initial expansion, corpora ---------------------
# Small files are hashed whole. Of the base's weights, which may be hundreds of GB, each node hashes
# blocks spread evenly over every file, with its header and its end. That finds another model,
# another version, and a file that was cut short or copied in part. It does not find a flipped byte
# between the blocks: training hashes every byte later, on one node.

BLOCKS = 512
"""The number of hashed blocks over all weight files; each file has at least two."""


def check_same_files(allocation: Allocation) -> Finding:
    """The files that every node reads have the same hashes on all nodes as on the first."""

    def hashes_here() -> dict[str, str]:
        if not allocation.is_first_on_node:
            return {}
        return _hashes(allocation.inputs)

    nodes = allocation.nodes
    hashes = all_gathered(run_on_all_ranks(hashes_here))
    faults: list[Fault] = []
    for rank in allocation.first_ranks:
        for name in sorted({*hashes[0], *hashes[rank]}):
            if hashes[rank].get(name) != hashes[0].get(name):
                faults.append(
                    Fault(
                        f"{name}: differs between {nodes[rank]} and {nodes[0]}; every node must "
                        "read the same file: copy it there again, or use a file system that all "
                        "nodes share"
                    )
                )
    result = f"are the same on {len(allocation.first_ranks)} node(s)"
    if faults:
        result = "differ between nodes"
    files = "base (sizes, headers and sampled blocks), tokenizer, expansion and corpora"
    return Finding(f"{files} {result}", faults)


def _hashes(inputs: RunInputs) -> dict[str, str]:
    """The hashes of the files on this node, by name."""
    config = inputs.config
    small_files = [config.base / "config.json", tokenizer_file(config.tokenizer)]
    if starts_from_expansion(config.method):
        small_files.append(config.initial_expansion_folder / EXPANSION_MANIFEST)
    for name in config.data.corpora:
        small_files.append(train_folder(config.data, name) / MANIFEST)
        small_files.append(heldout_folder(config.data, name) / MANIFEST)
    hashes: dict[str, str] = {}
    weight_files = inputs.base.files
    for file in weight_files:
        hashes[str(file)] = sampled_hash(file, max(2, BLOCKS // len(weight_files)))
    for file in small_files:
        hashes[str(file)] = file_hash(file) if file.exists() else "missing"
    return hashes


def check_corpora(allocation: Allocation) -> Finding:
    """The corpora's sizes, indexes and some of their tokens are those of their manifests.

    Each rank reads its share of the tokens.
    """
    corpora = allocation.inputs.samples.corpora
    nodes = allocation.nodes
    sampled_bytes = SAMPLED_BYTES // len(nodes) // max(1, len(corpora))
    share = (dist.get_rank(), len(nodes))

    def damaged() -> list[str]:
        found: list[str] = []
        for corpus in corpora:
            try:
                corpus.check(sampled=sampled_bytes, share=share)
            except DataError as error:
                found.append(str(error))
        return found

    by_rank = all_gathered(run_on_all_ranks(damaged))
    faults: list[Fault] = []
    for rank, texts in enumerate(by_rank):
        for text in texts:
            faults.append(Fault(f"{text} (seen on {nodes[rank]})"))
    result = "are damaged" if faults else "are those that were written"
    token_bytes = sum(corpus.token_bytes for corpus in corpora)
    sampled = f"{SAMPLED_BYTES // 2**20} MiB of tokens"
    if token_bytes <= SAMPLED_BYTES:
        sampled = f"all tokens ({token_bytes / 2**20:,.1f} MiB)"
    return Finding(f"corpora: sizes, indexes and {sampled} {result}", faults)
