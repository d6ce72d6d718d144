"""Whether all nodes share the folder of the checkpoints, and whether it has space for them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.files.disk_space import free_bytes, held_bytes
from pipeline.files.publishing import write_text
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks
from pipeline.sizing.checkpoints import checkpoints_bytes, no_room

PATIENCE_S = 10.0
"""How long a network file system may take to show a node the files of another."""


def check_disk(allocation: Allocation) -> Finding:
    """Every node can write the checkpoints' folder, sees what the others write, and it has space.

    Each node writes a small file, and waits until it sees the files of all others. Free space is
    statvfs's, which respects quotas on some file systems only. If the run has already saved, a full
    disk is a transient fault: other users filled it, and may make space.
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
                Fault(f"{folder}: {node} cannot write there: {refusal}", transient=has_saved)
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
        faults.append(Fault(str(no_room(folder, more, free)), transient=has_saved))
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
