"""One job a run folder, or a stage of it: a lock for shared file systems, where flock cannot be trusted.

A file that only one process can have made says who holds the folder. Its holder touches it every few seconds; who finds
it watches whether it is touched, by its own clock, and takes it over when it is not: see
docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import orjson

from pipeline import log
from pipeline.errors import LOST_RANK, FolderTakenError
from pipeline.files import published_file
from pipeline.log import node

# --- Who works in a run folder, and whether that process is known to be gone ----------------------------------------

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
class LockOwner:
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
    def this_process(environment: Mapping[str, str] = os.environ) -> LockOwner:
        """Who calls."""
        job = environment.get("SLURM_JOB_ID")
        return LockOwner(
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
    def of(values: Mapping[str, Any]) -> LockOwner:
        """One that `as_json` described.

        Raises:
            TypeError: the values are not a holder's.
        """
        return LockOwner(**values)

    def as_json(self) -> dict[str, Any]:
        """For `of`."""
        return asdict(self)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{f'job {self.job}' if self.job else 'a process'} on {self.node} (pid {self.pid}, since {since})"

    def is_earlier_start(self, now: LockOwner) -> bool:
        """Whether it is of an earlier start of the Slurm job that `now` is of."""
        same = self.job is not None and (self.cluster, self.job) == (now.cluster, now.job)
        return same and self.restart != now.restart

    def is_gone(self, now: LockOwner) -> bool:
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


# --- One job a run folder, or a stage of it: a lock for shared fi ---

TRAINING = "training"
TOUCH_EVERY_S = 5.0
STALE_AFTER_S = 60.0
"""Longer than file systems let a node believe what it read of a file before."""
SETTLE_S = 0.5
_NONE = (0, None)
_logger = log.get_logger(__name__)


class RunLock:
    """While it is entered, no other process enters one of the same folder and stage."""

    def __init__(self, folder: Path, stage: str = TRAINING, stale_after_s: float = STALE_AFTER_S) -> None:
        self._path = lock_path(folder, stage)
        self._stage = stage
        self._stale_after_s = stale_after_s
        self._own = LockOwner.this_process()
        self._released = threading.Event()
        self._made_folder = False

    def __enter__(self) -> RunLock:
        """Raises FolderTakenError where another process holds the folder."""
        self._made_folder = not self._path.parent.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._made():
            self._take_over()
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if read_lock_owner(self._path) == self._own:
            self._path.unlink(missing_ok=True)
            if self._made_folder:
                with contextlib.suppress(OSError):  # it holds what was done meanwhile
                    self._path.parent.rmdir()

    def _made(self) -> bool:
        """Whether the lock could be made, because there was none."""
        try:
            with self._path.open("xb") as file:
                self._fill(file)
        except FileExistsError:
            return False
        return True

    def _fill(self, file: BinaryIO) -> None:
        file.write(orjson.dumps(self._own.as_json()))
        file.flush()
        os.fsync(file.fileno())

    def _take_over(self) -> None:
        deadline = time.monotonic() + self._stale_after_s
        first = self._look()
        while (seen := self._look()) == first != _NONE and time.monotonic() < deadline:
            holder = first[1]
            if holder is not None and holder.is_gone(self._own):
                break
            time.sleep(min(1.0, self._stale_after_s / 10))
        if seen != first or seen == _NONE:
            if seen[1] is None and self._made():
                return  # its holder left just now
            raise self._refusal(seen[1])
        _logger.warning("%s: takes it over from %s, which is gone", self._path, first[1] or "an unknown process")
        with published_file(self._path) as file:
            self._fill(file)
            # Just before it is named: to ask Slurm, and the disk, takes time, in which another may have taken it over.
            if (seen := self._look()) != first:
                raise self._refusal(seen[1])
        # Two that find the same dead holder at the same moment both write; the later one has it.
        time.sleep(SETTLE_S)
        if (winner := read_lock_owner(self._path)) != self._own:
            raise self._refusal(winner)

    def _look(self) -> tuple[int, LockOwner | None]:
        """When the lock was last touched, and by whom; `_NONE` where it is gone.

        It is opened each time, for only that makes a network file system ask the server.
        """
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns, _parsed(file.read())
        except FileNotFoundError:
            return _NONE

    def _refusal(self, holder: LockOwner | None) -> FolderTakenError:
        stop = f"scancel {holder.job}" if holder and holder.job else "stop it"
        error = FolderTakenError(
            f"{self._path.parent}: {holder or 'another process'} is at the stage {self._stage} in this folder, and one "
            f"run folder takes one job; wait for it, {stop}, or give this run a `folder` of its own"
        )
        if holder is not None and holder.is_earlier_start(self._own):
            error.exit_code = LOST_RANK  # of a node that Slurm lost sight of: the next attempt may find it ended
        return error

    def _touch(self) -> None:
        """Shows that this process lives, and ends it where another took the folder over while it was stopped."""
        while not self._released.wait(TOUCH_EVERY_S):
            try:
                holder = read_lock_owner(self._path)
                if holder == self._own:
                    os.utime(self._path)  # without a time of ours: the file server's clock
                    continue
            except OSError as error:
                _logger.warning("%s: cannot be touched: %s", self._path, error)
                continue
            if not self._released.is_set():
                _logger.error("%s: lost to %s; this process ends", self._path, holder or "somebody who removed it")
                os._exit(LOST_RANK)


def lock_path(folder: Path, stage: str = TRAINING) -> Path:
    """Where the lock of a stage of the run in `folder` lies."""
    return folder / f"{stage}.lock"


def read_lock_owner(path: Path) -> LockOwner | None:
    """Who holds the lock `path`, or held it when a kill kept it from letting go; None where nobody does."""
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return None


def _parsed(text: bytes) -> LockOwner | None:
    try:
        return LockOwner.of(orjson.loads(text))
    except (ValueError, TypeError):  # its maker had no time to write more
        return None
