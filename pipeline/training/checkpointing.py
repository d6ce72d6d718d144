"""Saves and resumes a run. A checkpoint is complete or absent, and a full disk does not end training.

A checkpoint is written to a hidden folder and renamed when all files of all ranks are on the disk and hashed. Then
`latest` is set to it, and then older ones are removed. So a run that is killed at any moment leaves a complete one.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pipeline import log
from pipeline.checkpoint import folder as folders
from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint.manifest import FileRecord, LayoutRecord, Manifest, Position, RunRecord
from pipeline.checkpoint.torch_files import open_torch_file, write_torch_file
from pipeline.errors import CheckpointError, CheckpointStorageError, DamagedCheckpointError
from pipeline.files import file_hash
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, raise_on_all_ranks, run_on_all_ranks
from pipeline.run_folder.checkpoint_names import LATEST, all_checkpoints, checkpoint_name, named_checkpoint
from pipeline.training.engine import Engine
from pipeline.training.launch import COLLECTIVE_TIMEOUT

_GIB = 2**30
_logger = log.get_logger(__name__)


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    Attributes:
        failed_saves: how many saves failed since this attempt began.
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
        """Every rank must construct it. `asynchronous`: `save` returns when the state is copied to host memory.

        `timeout` is how long the first rank to finish writing waits for the last.
        """
        self.folder = folder
        self.run = run
        self.layout = layout
        self.keep_last = keep_last
        self.keep_every_steps = keep_every_steps
        self.asynchronous = asynchronous
        self.failed_saves = 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A separate group: messages of the saving thread must not mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._finish: Callable[[], None] = lambda: None

    def save(self, engine: Engine, position: Position, *, last: bool = False) -> Path:
        """Writes a checkpoint of `engine`; every rank must call it. Returns the checkpoint's folder.

        An asynchronous one is complete when `finish`, or the next `save`, returns. On a full or failing disk the
        earlier checkpoints stay and `failed_saves` counts; the `last` save is waited for and must succeed.

        Raises:
            CheckpointStorageError: the last could not be written; on rank 0, and SystemExit on the others.
        """
        self.finish()
        failed_before = self.failed_saves
        final = self.folder / checkpoint_name(position.step)
        unfinished = folders.unfinished(final)
        files = StateFiles(copied=self.asynchronous)
        if faults := self._disk_faults(lambda: folders.make_empty(unfinished) if self.rank == 0 else None):
            self._give_up(final, files, faults)
        else:
            engine.save(unfinished, files.add)
            files.add(unfinished / _random_state_file(self.rank), _random_state())
            if self.asynchronous:
                self._finish = in_background(partial(self._complete, final, files, position))
            else:
                self._complete(final, files, position)
        if last:
            self.finish()
            if self.failed_saves > failed_before:
                before = named_checkpoint(self.folder)
                raise_on_all_ranks(
                    CheckpointStorageError(
                        f"{final}: the last checkpoint could not be written, the line above has the cause; the newest "
                        f"is {before.name if before else 'none'}. Make room and start again"
                    )
                )
        return final

    def finish(self) -> None:
        """Waits until a background save is complete or has failed; every rank must call it before it exits."""
        finish, self._finish = self._finish, lambda: None
        finish()

    def resume(self, engine: Engine, before: int | None = None) -> Position | None:
        """Restores `engine` from the newest whole checkpoint, of any layout; every rank must call it.

        It tries the checkpoint that `latest` names, or with `before` the newest of fewer than `before` steps. A
        damaged one is renamed and the one before it is tried. Returns None if nothing was saved yet.

        Raises:
            CheckpointError: a checkpoint belongs to another base or run, or all of them are damaged.
        """
        damaged: tuple[Path, str] | None = None
        while checkpoint := broadcast_from_rank0(partial(self._next_candidate, before, damaged)):
            manifest, damage = run_on_all_ranks(partial(self._examine, checkpoint))
            damages = [text for text in all_gathered(damage) if text]
            if manifest is not None and not damages:
                self._restore(engine, checkpoint, manifest)
                return manifest.position
            damaged = checkpoint, damages[0]
        return None

    def record_rollback(self, position: Position) -> None:
        """Records `position` in the checkpoint that was restored: a kill before the next save must not forget the
        rollback and its skipped steps. Every rank must call it."""
        checkpoint = self.folder / checkpoint_name(position.step)

        def amend() -> None:
            if self.rank == 0:
                manifests.load_manifest(checkpoint).model_copy(update={"position": position}).save(checkpoint)

        for fault in self._disk_faults(amend):
            _logger.error("%s: the rollback is not on record until the next save: %s", checkpoint, fault)

    def _complete(self, final: Path, files: StateFiles, position: Position) -> None:
        """Writes, hashes and publishes the files of all ranks as a checkpoint, possibly on a background thread."""
        own: dict[str, FileRecord] = {}

        def write_and_hash() -> None:
            files.write()
            for path in files.paths:  # hashed by its writer, whose node still has it in the page cache
                own[path.name] = FileRecord(bytes=path.stat().st_size, sha256=file_hash(path))

        faults = self._disk_faults(write_and_hash)
        if not faults:
            written = {name: record for part in all_gathered(own, self._group) for name, record in part.items()}
            faults = self._disk_faults(lambda: self._publish(final, position, written) if self.rank == 0 else None)
        if faults:
            self._give_up(final, files, faults)

    def _publish(self, final: Path, position: Position, written: dict[str, FileRecord]) -> None:
        """Writes the manifest, renames the folder, and removes the checkpoints that it supersedes."""
        unfinished = folders.unfinished(final)
        Manifest(
            run=self.run,
            position=position,
            layout=self.layout,
            versions=manifests.versions(),
            files=dict(sorted(written.items())),
        ).save(unfinished)
        folders.publish(unfinished, final)
        steps = {folders.step_of(path): path for path in all_checkpoints(self.folder)}
        superseded = [steps[step] for step in folders.superseded([*steps], self.keep_last, self.keep_every_steps)]
        for path in [*superseded, *self.folder.glob(f"step_*{folders.ROLLED_BACK}*")]:
            folders.discard(path)
        _logger.info("saved %s", final)

    def _give_up(self, final: Path, files: StateFiles, faults: list[str]) -> None:
        """Removes the files of a failed save, and logs its cause."""
        self.failed_saves += 1
        needed = sum(all_gathered(files.bytes, self._group)) / _GIB
        if self.rank == 0:
            shutil.rmtree(folders.unfinished(final), ignore_errors=True)
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free / _GIB
            message = "%s was not saved (%s); it needs %.3f GiB, %.3f GiB are free"
            _logger.error(message, final, faults[0], needed, free)

    def _disk_faults(self, work: Callable[[], object]) -> list[str]:
        """Runs `work`, which every rank must call, and returns the OSErrors of all ranks; none where all succeeded."""
        fault: str | None = None
        try:
            work()
        except OSError as error:
            fault = f"rank {self.rank} on {socket.gethostname()}: {error.strerror or error}"
        return [text for text in all_gathered(fault, self._group) if text is not None]

    def _next_candidate(self, before: int | None, damaged: tuple[Path, str] | None) -> Path | None:
        """On rank 0: renames the checkpoint that was found `damaged`, and returns the next one to try."""
        named = named_checkpoint(self.folder)
        if damaged is not None:
            checkpoint, damage = damaged
            aside = folders.set_aside(checkpoint)
            _logger.warning("%s; renamed to %s, trying the one before", damage, aside.name)
        found = folders.candidates(self.folder)
        if before is not None:
            found = [checkpoint for checkpoint in found if folders.step_of(checkpoint) < before]
        elif not found and (named is not None or folders.holds_damaged(self.folder)):
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole; the damaged ones end in {folders.DAMAGED}. Copy a whole one "
                "back, or remove the folder to start the run from step 0"
            )
        elif found and damaged is None and found[0] != named:
            called = "no checkpoint" if named is None else f"{named.name}, which does not exist"
            _logger.warning("%s names %s; trying %s", self.folder / LATEST, called, found[0].name)
        return found[0] if found else None

    def _examine(self, checkpoint: Path) -> tuple[Manifest | None, str]:
        """Checks that `checkpoint` is of this run, and this rank's share of its files; returns what is damaged."""
        try:
            manifest = manifests.load_manifest(checkpoint)
            manifests.check_same_run(manifest, checkpoint, self.run)
            for name in sorted(manifest.files)[self.rank :: self.world_size]:
                manifests.check_file(manifest, checkpoint, name)
        except DamagedCheckpointError as damage:
            return None, str(damage)
        return manifest, ""

    def _restore(self, engine: Engine, checkpoint: Path, manifest: Manifest) -> None:
        _logger.info("resuming from %s", checkpoint)
        if manifest.layout != self.layout:
            _logger.info("it was written at another layout: %s", manifest.layout)
        # With more ranks than at the save, the additional ones take the random states of others.
        writer = self.rank % manifest.layout.world_size

        def read() -> dict[str, Tensor]:
            engine.restore(checkpoint)
            if self.rank == 0:
                folders.go_back_to(checkpoint)
            state: dict[str, Tensor] = open_torch_file(checkpoint / _random_state_file(writer))
            return state

        random_state = run_on_all_ranks(read)
        engine.publish_restored(manifest.position.step)
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])


def _random_state_file(rank: int) -> str:
    return f"random_state_rank_{rank:05d}.pt"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


class StateFiles:
    """A rank's files of a checkpoint: written immediately, or with `copied` kept as copies in host memory.

    Attributes:
        bytes: size of the tensors that were added; shared memory counts once.
        paths: the files.
    """

    def __init__(self, *, copied: bool) -> None:
        self.bytes = 0
        self.paths: list[Path] = []
        self._copied = copied
        self._waiting: list[tuple[Path, Any]] = []
        self._fault: OSError | None = None

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Writes `value` to the file `path`, or keeps a copy for `write`; its tensors may change afterwards.

        A fault is raised by `write` instead: DeepSpeed, which calls this, could not continue after one.
        """
        if self._copied:
            value = _copy_to_host(value)
            self._waiting.append((path, value))
        elif self._fault is None:
            try:
                write_torch_file(path, value)
            except OSError as fault:
                self._fault = fault
        self.paths.append(path)
        storages = [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        self.bytes += sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def write(self) -> None:
        """Writes the copies, each to the disk, and frees them.

        Raises:
            OSError: a file could not be written, because the disk is full or fails.
        """
        if self._fault is not None:
            raise self._fault
        while self._waiting:
            write_torch_file(*self._waiting.pop(0))


def _copy_to_host(value: Any) -> Any:  # noqa: ANN401
    """`value` with copies of its tensors in host memory; a tensor under two names is copied once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        key = (leaf.data_ptr(), leaf.device, leaf.dtype, tuple(leaf.shape), leaf.stride())
        if key not in copies or leaf.numel() == 0:
            copies[key] = leaf.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map(copied, value)


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Starts `work` on a thread; the function returned waits for its end, and raises what it raised."""
    done: Future[None] = Future()

    def guarded() -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001  # raised on the main thread
            done.set_exception(fault)
        else:
            done.set_result(None)

    # A daemon: a process that fails must not wait for a thread that waits for another rank.
    threading.Thread(target=guarded, name="checkpoint writer", daemon=True).start()
    return done.result
