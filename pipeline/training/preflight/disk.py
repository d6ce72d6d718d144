"""Whether the checkpoints will find room, and a folder that every node can write to and all see alike."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from pipeline.estimation.disk import held_bytes, no_room
from pipeline.files import free_bytes, sync
from pipeline.training.preflight.finding import Fault, Finding
from pipeline.training.preflight.ranks import Ranks
from pipeline.training.unison import from_first_rank, in_unison

PATIENCE_S = 10.0
"""How long a network file system may take to show one node what another has written."""
GB = 1e9


class Folder(NamedTuple):
    """What a node finds in the folder: why it cannot write there, and how much room there is."""

    fault: str | None
    free_bytes: int
    probe: str


def check_disk(folder: Path, needed_bytes: int, ranks: Ranks) -> Finding:
    """Writes a small file from every node, and looks for those of the others; every rank must call it.

    `needed_bytes` is what `folder` will hold in all. Room is what statvfs says, which knows of quotas on some file
    systems only.
    """
    own = _try(folder) if ranks.speaks_for_node else None
    folders: list[Folder | None] = [None] * len(ranks.nodes)
    dist.all_gather_object(folders, own)
    probes = [found.probe for found in folders if found is not None and found.fault is None]
    unseen: list[list[str]] = [[]] * len(ranks.nodes)
    writes = own is not None and own.fault is None
    dist.all_gather_object(unseen, in_unison(lambda: _unseen(folder, probes) if writes else []))
    if own is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written has its fault already
            (folder / own.probe).unlink(missing_ok=True)
    held = from_first_rank(lambda: held_bytes(folder))
    return judge_disk(folder, folders, unseen, held, needed_bytes, ranks)


def judge_disk(
    folder: Path,
    folders: Sequence[Folder | None],
    unseen: Sequence[Sequence[str]],
    held_bytes: int,
    needed_bytes: int,
    ranks: Ranks,
) -> Finding:
    """What the nodes found, by rank, where `held_bytes` of the `needed_bytes` are written.

    Of a run that has begun to save it is for others, who fill the disk, to make room: its faults may pass.
    """
    faults, passing = [], held_bytes > 0
    more_bytes = max(0, needed_bytes - held_bytes)
    written = [(ranks.nodes[rank], found) for rank, found in enumerate(folders) if found is not None]
    for node, found in written:
        if found.fault is not None:
            faults.append(Fault(f"{folder}: {node} cannot write there: {found.fault}", passing=passing))
    for rank, names in enumerate(unseen):
        if names:
            writers = ", ".join(node for node, found in written if found.probe in names)
            faults.append(
                Fault(
                    f"{folder}: {ranks.nodes[rank]} does not see what {writers} wrote there; set folder to a file "
                    "system that all nodes share"
                )
            )
    free = min((found.free_bytes for _, found in written if found.fault is None), default=0)
    if free < more_bytes and not faults:
        faults.append(Fault(str(no_room(folder, more_bytes, free)), passing=passing))
    return Finding(f"{folder}: {free / GB:.3g} GB free, checkpoints need {more_bytes / GB:.3g} GB more", tuple(faults))


def _try(folder: Path) -> Folder:
    probe = f".preflight.{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / probe).open("wb") as file:
            file.write(b"written before the first step, and removed again\n")
            file.flush()
            os.fsync(file.fileno())
        sync(folder)
        return Folder(None, free_bytes(folder), probe)
    except OSError as error:
        return Folder(error.strerror or str(error), 0, probe)


def _unseen(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of `names` that do not appear in time."""
    deadline = time.monotonic() + PATIENCE_S
    while missing := [name for name in names if not (folder / name).exists()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return missing
