"""The memory of this machine, as Linux and the job's control groups report it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def machine_memory() -> int:
    """The bytes of this machine, or less where a limit of its control groups is lower."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *_control_group_limits()])


def available_memory() -> int:
    """The bytes that this node's processes may still take.

    Linux's MemAvailable, or less where a limit of the job's control groups is lower.
    """
    bounds = list(_control_group_limits())
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[0] == "MemAvailable:":
            bounds.append(int(fields[1]) * 1024)
    return min(bounds)


def _control_group_limits() -> Iterator[int]:
    """The limits of memory of this process's control groups, of version 2."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if not line.startswith("0::"):
            continue  # A hierarchy of version 1.
        group = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        # A limit of any group above counts too: Slurm sets one for the job and one for the step.
        for folder in (group, *group.parents):
            file = folder / "memory.max"
            limit = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
            if limit != "max":
                yield int(limit)
