"""One job a run folder, or a stage of it: a lock for shared file systems, where flock cannot be trusted.

A file that only one process can have made says who holds the folder. Its holder touches it every few seconds; who finds
it watches whether it is touched, by its own clock, and takes it over when it is not: see
docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from pipeline import log
from pipeline.errors import FolderTakenError
from pipeline.exit_codes import LOST_RANK
from pipeline.files import published_file
from pipeline.run_folder.holder import Holder

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
        self._own = Holder.this_process()
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
        if read_holder(self._path) == self._own:
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
        if (winner := read_holder(self._path)) != self._own:
            raise self._refusal(winner)

    def _look(self) -> tuple[int, Holder | None]:
        """When the lock was last touched, and by whom; `_NONE` where it is gone.

        It is opened each time, for only that makes a network file system ask the server.
        """
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns, _parsed(file.read())
        except FileNotFoundError:
            return _NONE

    def _refusal(self, holder: Holder | None) -> FolderTakenError:
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
                holder = read_holder(self._path)
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


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock `path`, or held it when a kill kept it from letting go; None where nobody does."""
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return None


def _parsed(text: bytes) -> Holder | None:
    try:
        return Holder.of(orjson.loads(text))
    except (ValueError, TypeError):  # its maker had no time to write more
        return None
