"""A lock for a single process per run folder, or per stage, on shared file systems where flock is unreliable.

The lock is a file that is created exclusively and names its owner, which touches it every few seconds. Another process
takes it over if it has not been touched for a while, or if the owner is known to be gone. Lock libraries do not know
shared file systems or Slurm, which knows whether a requeued job's processes have ended:
docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from pipeline import log
from pipeline.errors import LOST_RANK, FolderTakenError, RunFolderError
from pipeline.files import published_file, read_bytes
from pipeline.log import node

TRAINING = "training"
TOUCH_EVERY_S = 5.0
STALE_AFTER_S = 60.0
"""Longer than file systems cache the attributes of a file."""
SETTLE_S = 0.5
_MISSING = (0, None)
_ENDED_STATES = (
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
_SLURM_TIMEOUT_S = 20.0
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class LockOwner:
    """A process, identified by Slurm's cluster, job and restart (None outside Slurm), node, boot and process number.

    Attributes:
        boot: the id of the machine's last boot.
        processes: the PID namespace; containers on one host have their own.
        process_started: clock ticks after the boot; a later process with the same `pid` differs in it.
        since: seconds of the epoch.
    """

    cluster: str | None
    job: str | None
    restart: int | None
    node: str
    boot: str
    processes: str
    pid: int
    process_started: int
    since: Annotated[float, Field(ge=0, lt=2**33)]

    @staticmethod
    def this_process(environment: Mapping[str, str] = os.environ) -> LockOwner:
        """The calling process."""
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

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{f'job {self.job}' if self.job else 'a process'} on {self.node} (pid {self.pid}, since {since})"

    def is_earlier_start(self, now: LockOwner) -> bool:
        """Whether it belongs to an earlier start of the Slurm job of `now`."""
        same = self.job is not None and (self.cluster, self.job) == (now.cluster, now.job)
        return same and self.restart != now.restart

    def is_gone(self, now: LockOwner) -> bool:
        """Whether the process is known to have ended, as seen by the process `now`. False if unknown."""
        if (self.boot, self.processes) == (now.boot, now.processes):
            return _started(self.pid) != self.process_started
        if self.job is None or self.cluster != (now.cluster or _cluster_of_this_host()):
            return False  # another cluster may have a job of the same id
        if self.is_earlier_start(now):
            # Slurm restarts a job after its processes ended, or after it lost contact with their node.
            return not _has_lost_contact(self.node)
        if self.job == now.job:
            return False
        return job_state(self.job) in (*_ENDED_STATES, None)


def job_state(job: str) -> str | None:
    """Slurm's name for a job's state, None for a job that it no longer knows, "" where it cannot be asked."""
    asked = _ask("squeue", "--noheader", "--jobs", job, "--format=%T")
    if asked is not None and (asked.returncode == 0 or "Invalid job id" in asked.stderr):
        return asked.stdout.strip() or None
    return ""


def _has_lost_contact(slurm_node: str) -> bool:
    """Whether Slurm does not know what runs on one of its nodes, or cannot be asked."""
    asked = _ask("sinfo", "--noheader", "--nodes", slurm_node, "--format=%T")
    state = asked.stdout.strip().lower() if asked is not None and asked.returncode == 0 else ""
    return not state or state.endswith("*") or state.startswith(("down", "unknown", "fail"))


@lru_cache(maxsize=1)
def _cluster_of_this_host() -> str | None:
    """The Slurm cluster of this host, outside of jobs; None without Slurm."""
    asked = _ask("scontrol", "show", "config")
    found = re.search(r"^ClusterName\s*=\s*(\S+)", asked.stdout, re.MULTILINE) if asked is not None else None
    return found[1] if found else None


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a Slurm command; None if there is no such command, or no answer in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _boot() -> str:
    """The id of this machine's boot; host names need not be unique."""
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
    """When a process started, in clock ticks after the boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class RunLock:
    """While it is entered, no other process can enter the lock of the same folder and stage."""

    def __init__(self, folder: Path, stage: str = TRAINING, stale_after_s: float = STALE_AFTER_S) -> None:
        self._path = lock_path(folder, stage)
        self._stage = stage
        self._stale_after_s = stale_after_s
        self._own = LockOwner.this_process()
        self._released = threading.Event()
        self._made_folder = False

    def __enter__(self) -> RunLock:
        """Raises FolderTakenError if another process owns the lock."""
        self._made_folder = not self._path.parent.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._create():
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
                with contextlib.suppress(OSError):  # it is no longer empty
                    self._path.parent.rmdir()

    def check_free(self) -> None:
        """Raises FolderTakenError if another process owns the lock, as entering it would."""
        if (owner := living_owner(self._path)) is not None:
            raise self._refusal(owner)

    def _create(self) -> bool:
        """Creates the lock; False if it exists."""
        try:
            with self._path.open("xb") as file:
                self._fill(file)
        except FileExistsError:
            return False
        return True

    def _fill(self, file: BinaryIO) -> None:
        file.write(orjson.dumps(self._own))
        file.flush()
        os.fsync(file.fileno())

    def _take_over(self) -> None:
        deadline = time.monotonic() + self._stale_after_s
        first = self._read()
        while (seen := self._read()) == first != _MISSING and time.monotonic() < deadline:
            owner = first[1]
            if owner is not None and owner.is_gone(self._own):
                break
            time.sleep(min(1.0, self._stale_after_s / 10))
        if seen != first or seen == _MISSING:
            if seen[1] is None and self._create():
                return  # its owner has just released it
            raise self._refusal(seen[1])
        _logger.warning("%s: taken over from %s, which is gone", self._path, first[1] or "an unknown process")
        with published_file(self._path) as file:
            self._fill(file)
            # Just before the rename: another process may have taken it over meanwhile.
            if (seen := self._read()) != first:
                raise self._refusal(seen[1])
        # If two processes find the same dead owner at the same moment, both write; the later one gets the lock.
        time.sleep(SETTLE_S)
        if (winner := read_lock_owner(self._path)) != self._own:
            raise self._refusal(winner)

    def _read(self) -> tuple[int, LockOwner | None]:
        """When the lock was last touched, and its owner; `_MISSING` if it is gone.

        It is opened each time, because only then does a network file system ask its server.
        """
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns, _parsed(file.read())
        except FileNotFoundError:
            return _MISSING

    def _refusal(self, owner: LockOwner | None) -> FolderTakenError:
        stop = f"scancel {owner.job}" if owner and owner.job else "stop it"
        error = FolderTakenError(
            f"{self._path.parent}: {owner or 'another process'} is at the stage {self._stage} in this folder, "
            f"which only one job may use; wait for it, {stop}, or give this run a `folder` of its own"
        )
        if owner is not None and owner.is_earlier_start(self._own):
            error.exit_code = LOST_RANK  # Slurm lost contact with its node; a later attempt may succeed
        return error

    def _touch(self) -> None:
        """Touches the lock regularly; ends this process if another took the lock over while this one was stopped."""
        while not self._released.wait(TOUCH_EVERY_S):
            try:
                owner = read_lock_owner(self._path)
                if owner == self._own:
                    os.utime(self._path)  # without a time: the file server's clock
                    continue
            except (OSError, RunFolderError) as error:
                _logger.warning("%s: cannot be touched: %s", self._path, error)
                continue
            if not self._released.is_set():
                _logger.error("%s: lost to %s; this process ends", self._path, owner or "a process that removed it")
                os._exit(LOST_RANK)


_OWNER = TypeAdapter(LockOwner)


def check_folder(folder: Path, stage: str = TRAINING) -> None:
    """Checks that a stage could enter its lock in `folder` now, and changes nothing.

    Raises:
        RunFolderError: nothing can be written there.
        FolderTakenError: another process owns the lock.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise RunFolderError(f"{folder}: {existing} is no folder; name another `folder`")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder}: {existing} cannot be written to; make it writable, or name another `folder`")
    RunLock(folder, stage).check_free()


def lock_path(folder: Path, stage: str = TRAINING) -> Path:
    """The lock file of a stage of the run in `folder`."""
    return folder / f"{stage}.lock"


def living_owner(path: Path) -> LockOwner | None:
    """The owner of the lock `path`, unless it is known to be gone or has not touched the lock for a while."""
    try:
        owner = read_lock_owner(path)
        gone = owner is None or owner.is_gone(LockOwner.this_process()) or age_s(path) > STALE_AFTER_S
    except FileNotFoundError:
        return None
    return None if gone else owner


def age_s(path: Path) -> float:
    """The seconds since `path` was written, by the clock of its file system, which need not be this machine's."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except OSError:  # nothing can be written there: this machine's clock has to do
        return time.time() - path.stat().st_mtime


def read_lock_owner(path: Path) -> LockOwner | None:
    """The owner of the lock `path`, which may have been killed since; None if there is no lock.

    Raises:
        RunFolderError: it cannot be read.
    """
    try:
        return _parsed(read_bytes(path, RunFolderError, "remove it"))
    except FileNotFoundError:
        return None


def _parsed(text: bytes) -> LockOwner | None:
    try:
        return _OWNER.validate_json(text)
    except ValidationError:  # killed before it was written
        return None
