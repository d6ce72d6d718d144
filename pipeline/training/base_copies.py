"""Hashes of the base's files and of the initial expansion's, of every copy that ranks read.

Under ZeRO-3 a rank reads its own part of the base alone, from the files of its node, and no other
rank holds the same part: only the files themselves can show that a node's copy is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pipeline.checks.inputs import RunInputs
from pipeline.errors import BaseModelError
from pipeline.files.file_systems import is_on_shared_file_system
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import json_hash
from pipeline.log import node
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks


def hash_base(inputs: RunInputs) -> None:
    """Hashes the files of the base and of the initial expansion: each copy of them once, divided
    among the ranks that read it.

    A node has a copy of its own, unless its files are on a file system that nodes share. Every rank
    must call it; all get the hashes of all files of the base.

    Raises:
        BaseModelError: a copy of the base lacks a file, or differs from rank 0's. On the lowest
            rank that reads such a copy; the other ranks raise SystemExit.
        CheckpointError: a file of the expansion has changed since it was written; on the lowest
            rank that found one.
    """
    base = inputs.base
    expansion = inputs.method.expansion
    if expansion is not None:
        copies = all_gathered(_copy_of(expansion.files))
        run_on_all_ranks(partial(expansion.check_files, _own_share(copies)))

    copies = all_gathered(_copy_of(base.files))
    own_part = run_on_all_ranks(partial(_hashes, base.files[_own_share(copies)]))
    hashes: dict[str, dict[str, str]] = {copy: {} for copy in copies}
    nodes: list[str] = []
    for copy, (name, part) in zip(copies, all_gathered((node(), own_part)), strict=True):
        hashes[copy].update(part)
        nodes.append(name)
    first = hashes[copies[0]]
    own = hashes[copies[dist.get_rank()]]
    run_on_all_ranks(partial(_check_same, base.path, own, first, nodes[0]))
    base.set_known_hashes(first)


def _copy_of(files: Sequence[Path]) -> str:
    """Equal on two ranks only where they read the same copy of `files`.

    Of a file that nodes share, they all see the same number and times. A copy has others: no
    program can set when a file's entry was changed.
    """
    described: list[list[object]] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            described.append([node(), "missing"])  # reported where it is hashed
            continue
        place = "" if is_on_shared_file_system(status) else f"{node()} {status.st_dev}"
        times = [status.st_mtime_ns, status.st_ctime_ns]
        described.append([place, status.st_ino, status.st_size, *times])
    return json_hash(described)


def _own_share(copies: Sequence[str]) -> slice:
    """Which files this rank reads, of those that it shares with the ranks of the same copy."""
    own = dist.get_rank()
    readers = [rank for rank, copy in enumerate(copies) if copy == copies[own]]
    return slice(readers.index(own), None, len(readers))


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for file in files:
        try:
            hashes[file.name] = file_hash(file)
        except FileNotFoundError:
            raise BaseModelError(
                f"{file}: no such file; every node must read the same base: copy it there again"
            ) from None
    return hashes


def _check_same(
    folder: Path, own: dict[str, str], of_first: dict[str, str], first_node: str
) -> None:
    """Raises BaseModelError where this rank's copy of the base differs from that of rank 0."""
    for name, expected in sorted(of_first.items()):
        if own.get(name) != expected:
            raise BaseModelError(
                f"{folder / name}: differs from the file of the same name on {first_node} (another "
                "SHA-256); one of the two is damaged: copy the base to both nodes again, or use a "
                "file system that they share"
            )
