"""A lock for one process per run folder and stage, without flock.

flock is unreliable on shared file systems. The lock is a file that is created exclusively and names
its owner, which touches it every few seconds. Another process removes it once the owner is known to
be gone, as a process of the same machine can be, or has not touched it for a minute by the file
server's clock: docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline import log
from pipeline.errors import LOST_RANK, FolderTakenError, RunFolderError
from pipeline.files.disk_space import nearest_existing
from pipeline.files.publishing import own_temporary
from pipeline.files.reading import read_bytes
from pipeline.log import node
from pipeline.processes import machine_id, process_exists

TRAINING = "training"
TOUCH_EVERY_S = 5.0
STALE_AFTER_S = 60.0
"""As long as NFS clients cache the attributes of a file (acregmax): until then a touch may not be
seen.
"""
_logger = log.get_logger(__name__)


class LockOwner(BaseModel):
    """A process, as the owner of a lock or of a record.

    Attributes:
        job: its Slurm job; None outside Slurm.
        restart: how often that job was restarted.
        machine: the id of its machine's last boot, and its PID namespace: containers on one host
            have their own.
        process_started: when it started, in clock ticks after the boot. A later process with the
            same `pid` differs in it.
        since: when this record was made, in seconds of the epoch.
    """

    model_config = ConfigDict(frozen=True)

    job: str | None
    restart: int | None
    node: str
    machine: str
    pid: int
    process_started: int
    since: float

    @staticmethod
    def this_process() -> LockOwner:
        return LockOwner(
            job=os.environ.get("SLURM_JOB_ID"),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            node=node(),
            machine=machine_id(),
            pid=os.getpid(),
            process_started=_started(os.getpid()) or 0,
            since=time.time(),
        )

    def __str__(self) -> str:
        who = "a process"
        if self.job:
            who = f"job {self.job}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{who} on {self.node} (pid {self.pid}, since {since})"

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended, as one of this machine can be."""
        if self.machine != machine_id():
            return False
        started = _started(self.pid)
        if started is None and _is_hidden(self.pid):
            return False
        return started != self.process_started


_UNKNOWN = LockOwner(
    job=None, restart=None, node="another node", machine="", pid=0, process_started=0, since=0
)
"""The owner of a lock that is not written yet."""


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks after the boot.

    None if it does not exist or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The program's name, in parentheses, may hold blanks: the numbered fields come after it.
    _, _, rest = text.rpartition(")")
    fields = rest.split()
    state = fields[0]
    if state in "ZX":
        return None
    return int(fields[19])  # the 22nd of proc(5), starttime


def _is_hidden(pid: int) -> bool:
    """Whether a process exists that /proc does not show, as one of another user under hidepid."""
    return not Path(f"/proc/{pid}").exists() and process_exists(pid)


class RunLock:
    """While it is entered, no other process can enter the lock of the same folder and stage."""

    def __init__(self, folder: Path, stage: str = TRAINING) -> None:
        self._path = lock_path(folder, stage)
        self._own = LockOwner.this_process()
        self._released = threading.Event()

    def __enter__(self) -> RunLock:
        """Takes the lock.

        Raises:
            FolderTakenError: another process owns it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            self._remove_dead()
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        # It may be another's by now, if this process was stopped for over a minute.
        if read_lock_owner(self._path) == self._own:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Creates the lock; False if it exists."""
        try:
            # O_EXCL: the file server lets one process create it, on NFS since version 3.
            file = self._path.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._own.model_dump_json())
        except OSError:  # of a full disk
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _remove_dead(self) -> None:
        """Removes the lock if its owner is gone or silent.

        Raises:
            FolderTakenError: the owner touched the lock, or is alive, a second later.
        """
        with contextlib.suppress(FileNotFoundError):  # the owner has released it
            self._refuse_living_owner()
            dead = read_lock_owner(self._path)
            aside = own_temporary(self._path)
            # Of two processes that do this, one finds no file. A rename takes this very file away,
            # where unlink by name could remove a lock that somebody took meanwhile.
            self._path.rename(aside)
            if read_lock_owner(aside) != dead:
                # Another process took the lock over just before.
                aside.rename(self._path)
                return
            aside.unlink()
            _logger.warning("%s: taken over from %s, which is gone", self._path, dead)

    def _refuse_living_owner(self) -> None:
        """Returns when the owner is gone or silent; FolderTakenError if it lives."""
        first_touched: float | None = None
        while True:
            owner = living_owner(self._path)
            if owner is None:
                return
            touched = self._path.stat().st_mtime
            if first_touched is not None:
                is_of_this_machine = owner.machine == machine_id()
                if is_of_this_machine or touched != first_touched:
                    raise _refusal(self._path, owner)
            first_touched = touched
            # The lock of another machine is watched until it is touched or stale: its owner may
            # have been killed just before.
            time.sleep(1)

    def _touch(self) -> None:
        """Touches the lock regularly, on a thread.

        Ends this process if another one took the lock over while this one was stopped.
        """
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
                _logger.error(
                    "%s: lost to %s; this process ends",
                    self._path,
                    owner or "a process that removed it",
                )
                os._exit(LOST_RANK)


def check_folder(folder: Path, stage: str = TRAINING) -> None:
    """Checks that a stage could enter its lock in `folder` now, and changes nothing.

    Raises:
        RunFolderError: nothing can be written there.
        FolderTakenError: another process owns the lock.
    """  # noqa: DOC501
    existing = nearest_existing(folder)
    if not existing.is_dir():
        raise RunFolderError(f"{folder}: {existing} is no folder; name another `folder`")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder}: {existing} cannot be written to; name another `folder`")
    path = lock_path(folder, stage)
    owner = living_owner(path)
    if owner is not None:
        raise _refusal(path, owner)


def _refusal(path: Path, owner: LockOwner) -> FolderTakenError:
    own = LockOwner.this_process()
    # An earlier start of this job lives if Slurm lost contact with its node. A later attempt may
    # succeed.
    is_earlier_start = (
        owner.job is not None and owner.job == own.job and owner.restart != own.restart
    )
    remedy = "stop it"
    if owner.job:
        remedy = f"scancel {owner.job}"
    return FolderTakenError(
        f"{path.parent}: {owner} is at the stage {path.stem} in this folder, which only one job "
        f"may use; wait for it, {remedy}, or give this run a `folder` of its own",
        LOST_RANK if is_earlier_start else None,
    )


def lock_path(folder: Path, stage: str = TRAINING) -> Path:
    return folder / f"{stage}.lock"


def living_owner(path: Path) -> LockOwner | None:
    """The owner of the lock `path`.

    None if it is known to be gone, or has not touched the lock for a while.
    """
    # Read first: opening the file makes a network file system ask its server how old it is.
    owner = read_lock_owner(path)
    if owner is None or owner.is_gone:
        return None
    try:
        if age_s(path) > STALE_AFTER_S:
            return None
    except FileNotFoundError:
        return None
    return owner


def age_s(path: Path) -> float:
    """The seconds since `path` was written.

    They are measured by the clock of its file system, which need not be this machine's.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except OSError:
        # Nothing can be written there: this machine's clock has to do.
        return time.time() - path.stat().st_mtime


def read_lock_owner(path: Path) -> LockOwner | None:
    """The owner of the lock `path`, which may have been killed since; None if there is none."""
    try:
        return LockOwner.model_validate_json(read_bytes(path, RunFolderError, "remove it"))
    except FileNotFoundError:
        return None
    except ValidationError:
        return _UNKNOWN
