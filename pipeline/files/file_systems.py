"""Which file systems several machines share."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# Names that Linux has for them. Any other is taken for a machine's own: a file is then read once
# more, but no damaged copy is overlooked.
_SHARED = {
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.glusterfs",
    "fuse.juicefs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "panfs",
    "smb3",
    "wekafs",
}


def is_on_shared_file_system(status: os.stat_result) -> bool:
    """Whether a file is on a file system of a kind that several machines share."""
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return _types_by_device().get(device) in _SHARED


@cache
def _types_by_device() -> dict[str, str]:
    """The type of each mounted file system, by its device's numbers; empty where it is not Linux's.

    A line of the file: `36 35 98:0 /root /mount rw,noatime master:1 - ext3 /dev/root rw`.
    """
    types: dict[str, str] = {}
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return types
    for line in lines:
        mounted, _, file_system = line.partition(" - ")
        device = mounted.split()[2]
        types[device] = file_system.split()[0]
    return types
