"""A rank's device, and the memory that it, or a node's host, has to give."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU: those that are free now, and all."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def host_memory() -> int:
    """Bytes that this node's processes may still take: what Linux calls available, within the job's own limit."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = next(int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:")
    return min([available, *_job_limits()])


def _job_limits() -> list[int]:
    """The memory limits of the control groups (v2) that this process stands in, from its own to the outermost."""
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines() if line[:3] == "0::"]
    limits = []
    for path in own:
        group = _CGROUPS / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / "memory.max"
            if file.is_file() and (limit := file.read_text(encoding="ascii").strip()).isdecimal():
                limits.append(int(limit))
    return limits
