"""Who works in a run folder, and whether that process is known to be gone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.log import node

_OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "TIMEOUT",
)
_SLURM_S = 20.0


@dataclass(frozen=True)
class Holder:
    """A process: the Slurm cluster, job and restart (None outside Slurm), the node, the host and its boot, the process.

    `processes` is the space in which process numbers are unique: containers on one host have their own.
    `process_started` tells a process from a later one that got its number; it counts from the boot.
    """

    cluster: str | None
    job: str | None
    restart: int | None
    node: str
    boot: str
    processes: str
    pid: int
    process_started: int
    since: float

    @staticmethod
    def this_process(environment: Mapping[str, str] = os.environ) -> Holder:
        """Who calls."""
        job = environment.get("SLURM_JOB_ID")
        return Holder(
            cluster=environment.get("SLURM_CLUSTER_NAME"),
            job=job,
            restart=None if job is None else int(environment.get("SLURM_RESTART_COUNT", "0")),
            node=node(),
            boot=_boot(),
            processes=_process_space(),
            pid=os.getpid(),
            process_started=_started(os.getpid()) or 0,
            since=time.time(),
        )

    @staticmethod
    def of(values: Mapping[str, Any]) -> Holder:
        """One that `as_json` described.

        Raises:
            TypeError: the values are not a holder's.
        """
        return Holder(**values)

    def as_json(self) -> dict[str, Any]:
        """For `of`."""
        return asdict(self)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{f'job {self.job}' if self.job else 'a process'} on {self.node} (pid {self.pid}, since {since})"

    def is_earlier_start(self, now: Holder) -> bool:
        """Whether it is of an earlier start of the Slurm job that `now` is of."""
        same = self.job is not None and (self.cluster, self.job) == (now.cluster, now.job)
        return same and self.restart != now.restart

    def is_gone(self, now: Holder) -> bool:
        """Whether the process is known to have ended, as seen by `now`. False where nothing is known."""
        if (self.boot, self.processes) == (now.boot, now.processes):
            return _started(self.pid) != self.process_started
        if self.job is None or self.cluster != (now.cluster or _cluster_of_this_host()):
            return False  # another cluster may have a job of the same number
        if self.is_earlier_start(now):
            # Slurm starts a job again when it has seen its processes end, or has lost sight of their node.
            return not _is_out_of_sight(self.node)
        if self.job == now.job:
            return False
        return job_state(self.job) in (*_OVER, None)


def job_state(job: str) -> str | None:
    """Slurm's word for a job's state, None for a job that it no longer knows, "" where it cannot be asked."""
    asked = _ask("squeue", "--noheader", "--jobs", job, "--format=%T")
    if asked is not None and (asked.returncode == 0 or "Invalid job id" in asked.stderr):
        return asked.stdout.strip() or None
    return ""


def _is_out_of_sight(slurm_node: str) -> bool:
    """Whether Slurm does not know what runs on a node of its, or cannot be asked."""
    asked = _ask("sinfo", "--noheader", "--nodes", slurm_node, "--format=%T")
    state = asked.stdout.strip().lower() if asked is not None and asked.returncode == 0 else ""
    return not state or state.endswith("*") or state.startswith(("down", "unknown", "fail"))


@lru_cache(maxsize=1)
def _cluster_of_this_host() -> str | None:
    """The cluster that Slurm's commands here speak to, outside its jobs; None where there are none."""
    asked = _ask("scontrol", "show", "config")
    found = re.search(r"^ClusterName\s*=\s*(\S+)", asked.stdout, re.MULTILINE) if asked is not None else None
    return found[1] if found else None


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """What a command of Slurm's answers; None where there is no such command, or no answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _boot() -> str:
    """This machine since its last boot: host names may be the same on several."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _process_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process of this machine started, in ticks after the boot; None where there is none, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
