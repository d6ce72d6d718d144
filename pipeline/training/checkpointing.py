"""Work that training does not wait for."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import log
from pipeline.checkpoint import folder as folders
from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint.manifest import FileRecord, LayoutRecord, Manifest, Position, RunRecord
from pipeline.checkpoint.torch_files import open_torch_file, write_torch_file
from pipeline.errors import CheckpointError, CheckpointStorageError, DamagedCheckpointError
from pipeline.files import file_hash
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks, warn_on_rank0
from pipeline.training.engine import Engine
from pipeline.training.launch import COLLECTIVE_TIMEOUT


class Background:
    """One piece of work at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`; what was begun before must be finished."""

        def guarded() -> None:
            try:
                work()
            except BaseException as fault:  # noqa: BLE001  it is raised where it can be heard
                self._fault = fault

        # A daemon: a run that fails elsewhere must not wait for a thread that waits for another rank.
        self._thread = threading.Thread(target=guarded, name="checkpoint writer", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the work, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault


# --- The files of tensors that a rank puts into a checkpoint: written at once, or from copies while training goes on


class Files(Protocol):
    """What takes files of tensors, to be on the disk when `write` has returned.

    Attributes:
        bytes: of the tensors that were added.
        paths: of the files.
    """

    bytes: int
    paths: list[Path]

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Takes `value`, for the file `path`."""

    def write(self) -> None:
        """Writes what was added.

        Raises:
            OSError: the disk is full, or cannot be written.
        """


class HostCopies:
    """Files to be written, with copies of the tensors that go into them: the originals may change at once."""

    def __init__(self) -> None:
        self.bytes = 0
        self.paths: list[Path] = []
        self._files: list[tuple[Path, Any]] = []

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Takes a copy of `value`."""
        copy = _on_host(value, {})
        self._files.append((path, copy))
        self.paths.append(path)
        self.bytes += _bytes(copy)

    def write(self) -> None:
        """Writes the files, each with its content on the disk, and lets the copies go."""
        while self._files:
            write_torch_file(*self._files.pop(0))


class DirectFiles:
    """Files written as they are added. The first fault is raised by `write`: DeepSpeed could not go on from one."""

    def __init__(self) -> None:
        self.bytes = 0
        self.paths: list[Path] = []
        self._fault: OSError | None = None

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Writes `value`, unless a file could not be written."""
        self.paths.append(path)
        self.bytes += _bytes(value)
        if self._fault is None:
            try:
                write_torch_file(path, value)
            except OSError as fault:
                self._fault = fault

    def write(self) -> None:
        """All is written, or was not."""
        if self._fault is not None:
            raise self._fault


def _on_host(value: Any, copied: dict[tuple[Any, ...], Tensor]) -> Any:  # noqa: ANN401
    """`value` with copies of its tensors; what is one tensor under two names (`copied`) stays one."""
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride())
        if key not in copied or value.numel() == 0:
            copied[key] = value.detach().to("cpu", copy=True)
        return copied[key]
    if isinstance(value, dict):
        made = {name: _on_host(one, copied) for name, one in value.items()}
        return made if type(value) is dict else type(value)(made)
    if type(value) in (list, tuple):
        return type(value)(_on_host(one, copied) for one in value)
    return value


def _bytes(value: Any) -> int:  # noqa: ANN401
    """What the tensors in `value` weigh, each memory once, however many of them lie in it."""
    storages = (tensor.untyped_storage() for tensor in _tensors(value))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors in `value`, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


# --- Saving and resuming: the base by reference, whole or not there, and no run ends because a disk is full for a while
# A checkpoint is written to a hidden folder and renamed when every file of every rank is on the disk and hashed; only
# then does `latest` name it, and only after that do older ones go. A run killed at any instant finds a whole one.

_GIB = 2**30
Value = TypeVar("Value")
_logger = log.get_logger(__name__)


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    Attributes:
        failed_saves: how many could not be written since the run began or went on.
    """

    def __init__(
        self,
        folder: Path,
        run: RunRecord,
        layout: LayoutRecord,
        *,
        keep_last: int,
        keep_every_steps: int | None = None,
        asynchronous: bool = False,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        """Every rank must make one. `asynchronous`: `save` returns when the state is copied to the host's memory.

        `timeout` is how long the first rank to be done with writing waits for the last.
        """
        self.folder = folder
        self.run = run
        self.layout = layout
        self.keep_last = keep_last
        self.keep_every_steps = keep_every_steps
        self.asynchronous = asynchronous
        self.failed_saves = 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Of its own: a thread that saves must not mix its messages with the training's.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._background = Background()

    def save(self, engine: Engine, position: Position, *, last: bool = False) -> Path:
        """Writes a checkpoint of `engine`; every rank must call it. Returns where it will lie.

        An asynchronous one is whole when `finish` returns, or the next `save`. A full disk, or one that fails, leaves
        what was there and counts in `failed_saves`; the `last` save is waited for and must succeed.

        Raises:
            CheckpointStorageError: the last could not be written; on the first rank, the others leave without a word.
        """
        self.finish()
        final = self.folder / folders.checkpoint_name(position.step)
        partial = folders.unfinished(final)
        files: Files = HostCopies() if self.asynchronous else DirectFiles()
        faults = self._together(lambda: folders.make_empty(partial) if self.rank == 0 else None)
        if faults:
            self._give_up(final, files, faults)
        else:
            engine.save(partial, files.add)
            files.add(partial / _random_state_file(self.rank), _random_state())
            if self.asynchronous:
                self._background.start(lambda: self._complete(final, files, position))
            else:
                self._complete(final, files, position)
        if last:
            self.finish()
            run_on_all_ranks(lambda: self._check_saved(final) if self.rank == 0 else None)
        return final

    def finish(self) -> None:
        """Waits until what was begun is whole, or has failed; every rank must call it before it leaves."""
        self._background.finish()

    def figures(self) -> dict[str, float]:
        """What there is to log of the saves: nothing as long as all succeed."""
        return {"failed_saves": self.failed_saves} if self.failed_saves else {}

    def _check_saved(self, final: Path) -> None:
        latest = folders.named_checkpoint(self.folder)
        if latest != final:
            raise CheckpointStorageError(
                f"{final}: the last checkpoint could not be written, the line above says why; the one before is "
                f"{latest.name if latest else 'not there'}. Make room and start again"
            )

    def _complete(self, final: Path, files: Files, position: Position) -> None:
        """Makes a checkpoint of the files of all ranks: on the disk, hashed, named. A thread may do it."""
        own: dict[str, FileRecord] = {}

        def write_and_hash() -> None:
            files.write()
            # By the rank that wrote it: its node has it in memory still.
            own.update({path.name: _record(path) for path in files.paths})

        faults = self._together(write_and_hash)
        if not faults:
            merged = {name: record for part in self._gathered(own) for name, record in part.items()}
            manifest = Manifest(
                run=self.run,
                position=position,
                layout=self.layout,
                versions=manifests.versions(),
                files=dict(sorted(merged.items())),
            )
            faults = self._together(lambda: self._publish(manifest, final) if self.rank == 0 else None)
        if faults:
            self._give_up(final, files, faults)

    def _publish(self, manifest: Manifest, final: Path) -> None:
        partial = folders.unfinished(final)
        manifest.save(partial)
        folders.publish(partial, final)
        steps = {folders.step_of(path): path for path in folders.all_checkpoints(self.folder)}
        newest = manifest.position.step
        for step in folders.superseded([*steps], newest, self.keep_last, self.keep_every_steps):
            folders.discard(steps[step])
        _logger.info("saved %s", final)

    def _give_up(self, final: Path, files: Files, faults: list[str]) -> None:
        """Leaves nothing of a save that failed, and says so."""
        self.failed_saves += 1
        needed = sum(self._gathered(files.bytes))
        if self.rank == 0:
            shutil.rmtree(folders.unfinished(final), ignore_errors=True)
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
            _logger.error(
                "%s was not saved (%s); it needs %.3f GiB, %.3f GiB are free",
                final,
                faults[0],
                needed / _GIB,
                free / _GIB,
            )

    def _together(self, work: Callable[[], object]) -> list[str]:
        """What the disks of all ranks said to `work`, which every rank must call: nothing where it succeeded."""
        fault: str | None = None
        try:
            work()
        except OSError as error:
            fault = f"rank {self.rank} on {socket.gethostname()}: {error.strerror or error}"
        return [one for one in self._gathered(fault) if one is not None]

    def _gathered(self, value: Value) -> list[Value]:
        """Each rank's `value`, in the order of the ranks."""
        values: list[Value] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def resume(self, engine: Engine, before: int | None = None) -> Position | None:
        """Restores `engine` from the newest whole checkpoint, of whatever layout; every rank must call it.

        The first choice is the one that `latest` names, or, if given, the newest of fewer than `before` steps. Whatever
        is damaged is set aside and the one before it is tried. None where nothing was saved yet.

        Raises:
            CheckpointError: a checkpoint belongs to another base or run, or there were some and none is whole.
        """
        named, found = broadcast_from_rank0(
            lambda: (folders.named_checkpoint(self.folder), folders.candidates(self.folder))
        )
        if before is not None:
            found = [checkpoint for checkpoint in found if folders.step_of(checkpoint) < before]
        elif found and found[0] != named:
            called = "no checkpoint" if named is None else f"{named.name}, which is not there"
            warn_on_rank0(_logger, "%s names %s; %s is tried", self.folder / folders.LATEST, called, found[0].name)
        for checkpoint in found:
            manifest = self._examine(checkpoint)
            if manifest is not None:
                self._restore(engine, checkpoint, manifest)
                return manifest.position
        if before is None:
            run_on_all_ranks(self._check_nothing_lost)
        return None

    def _examine(self, checkpoint: Path) -> Manifest | None:
        """The manifest of `checkpoint`, if it is whole and of this run; one that is damaged is set aside."""

        def look() -> tuple[Manifest | None, str]:
            try:
                manifest = manifests.load_manifest(checkpoint)
                manifests.check_same_run(manifest, checkpoint, self.run)
                for name in sorted(manifest.files)[self.rank :: self.world_size]:
                    manifests.check_file(manifest, checkpoint, name)
            except DamagedCheckpointError as damage:
                return None, str(damage)
            return manifest, ""

        manifest, damage = run_on_all_ranks(look)
        said = [one for one in self._gathered(damage) if one]
        if not said:
            return manifest
        aside = broadcast_from_rank0(lambda: folders.set_aside(checkpoint))
        warn_on_rank0(_logger, "%s; it is set aside as %s, and the one before is tried", said[0], aside.name)
        return None

    def _check_nothing_lost(self) -> None:
        if folders.holds_damaged(self.folder) or folders.named_checkpoint(self.folder) is not None:
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole; those that are damaged end in {folders.DAMAGED}. Copy a whole "
                "one back, or remove the folder to begin the run anew"
            )

    def _restore(self, engine: Engine, checkpoint: Path, manifest: Manifest) -> None:
        _logger.info("goes on from %s", checkpoint)
        if manifest.layout != self.layout:
            _logger.info("it was written by another layout: %s", manifest.layout)
        engine.load(checkpoint, manifest.position.step)
        # A rank that the checkpoint does not know takes up the state of one that it does.
        writer = self.rank % manifest.layout.world_size
        _restore_random_state(run_on_all_ranks(lambda: open_torch_file(checkpoint / _random_state_file(writer))))
        broadcast_from_rank0(lambda: folders.point_to(checkpoint))


def _record(path: Path) -> FileRecord:
    return FileRecord(bytes=path.stat().st_size, sha256=file_hash(path))


def _random_state_file(rank: int) -> str:
    return f"random_state_rank_{rank:05d}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
