"""Saves and resumes a run. A checkpoint is complete or absent, and a full disk ends no training.

A checkpoint is written to a hidden folder, and renamed when the files of all ranks are on the disk
and hashed. Then `latest` is set to it, and only then are older ones removed. A run that is killed
at any moment therefore leaves a complete one.
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

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import log
from pipeline.checkpoint import folder as folders
from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint.manifest import CheckpointFile, CheckpointManifest, LayoutRecord, RunRecord
from pipeline.checkpoint.position import Position
from pipeline.checkpoint.rank_files import (
    Index,
    RankState,
    rank_file,
    read_index,
    read_random_state,
    write_rank_file,
)
from pipeline.config.checkpoints import CheckpointSettings
from pipeline.errors import CheckpointError, CheckpointStorageError, DamagedCheckpointError
from pipeline.files.hashes import file_hash
from pipeline.parallel.ranks import (
    all_gathered,
    broadcast_from_rank0,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from pipeline.run_folder.checkpoint_names import (
    LATEST,
    all_checkpoints,
    checkpoint_name,
    named_checkpoint,
)
from pipeline.training.engine import Engine
from pipeline.training.launch import COLLECTIVE_TIMEOUT

EngineAfter = Callable[[int, Index], Engine]
"""Gives the engine that trains the step after so many steps, to be restored from a checkpoint.

Every rank must call it.
"""
_logger = log.get_logger(__name__)


class CheckpointManager:
    """The checkpoints of one run, in `folder`; every rank must make it.

    Attributes:
        failed_saves: how many saves have failed since this attempt began.
    """

    def __init__(
        self,
        folder: Path,
        run: RunRecord,
        layout: LayoutRecord,
        settings: CheckpointSettings,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        rollback_steps: int = 0,
    ) -> None:
        """Makes a process group; every rank must call it.

        Args:
            timeout: how long the first rank to finish writing waits for the last.
            rollback_steps: how far back training may have to go: a checkpoint that lies so far
                behind the newest one is kept, however few are kept otherwise.
        """
        self.folder = folder
        self.run = run
        self.layout = layout
        self.settings = settings
        self.rollback_steps = rollback_steps
        self.failed_saves = 0
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # A separate group: messages of the saving thread must not mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._wait_for_save: Callable[[], None] | None = None

    def save(self, engine: Engine, position: Position, *, required: bool = False) -> Path:
        """Writes a checkpoint of `engine`; every rank must call it. Returns its folder.

        An asynchronous save is complete when `finish`, or the next `save`, returns. On a full or
        failing disk the earlier checkpoints stay, and `failed_saves` counts. A `required` save, as
        the run's last and the last of each stage are, is waited for and must succeed.

        Raises:
            CheckpointStorageError: on rank 0, if a `required` save failed. The other ranks raise
                SystemExit.
        """
        self.finish()
        failed_before = self.failed_saves
        final = self.folder / checkpoint_name(position.step)
        state = engine.state()
        if self.settings.asynchronous:
            # The values are views of what the next steps change.
            # `copy=True`, because `to` returns the tensor itself where the optimizer is on the
            # host.
            copies = {name: value.to("cpu", copy=True) for name, value in state.values.items()}
            copied = state._replace(values=copies)
            self._wait_for_save = in_background(partial(self._write, final, position, copied))
        else:
            self._write(final, position, state)
        if required:
            self.finish()
            if self.failed_saves > failed_before:
                raise_on_all_ranks(
                    CheckpointStorageError(
                        f"{final}: the last checkpoint could not be written, the line above has "
                        "the cause; make room and start again"
                    )
                )
        return final

    def finish(self) -> None:
        """Waits until a background save is complete or has failed.

        Every rank must call it before it exits.
        """
        wait = self._wait_for_save
        self._wait_for_save = None
        if wait is not None:
            wait()

    def resume(self, engine_after: EngineAfter, before: int | None = None) -> Position | None:
        """Restores an engine from the newest whole checkpoint, of any layout.

        Every rank must call it. It tries the checkpoint that `latest` names, or with `before` the
        newest one of fewer than `before` steps. A damaged one is renamed, and the one before it is
        tried. Returns None if nothing was saved yet.

        Args:
            engine_after: gives the engine of the stage in which the run goes on.
            before: see above.

        Raises:
            CheckpointError: a checkpoint belongs to another base or run, or all are damaged.
        """
        damaged: tuple[Path, str] | None = None
        while True:
            candidate = broadcast_from_rank0(partial(self._next_candidate, before, damaged))
            if candidate is None:
                return None
            checkpoint, manifest = candidate
            own_damage = run_on_all_ranks(partial(self._examine, checkpoint, manifest))
            damages = [damage for damage in all_gathered(own_damage) if damage is not None]
            if not damages:
                self._restore(engine_after, checkpoint, manifest)
                return manifest.position
            damaged = (checkpoint, damages[0])

    def record_rollback(self, position: Position) -> None:
        """Records `position` in the checkpoint that was restored; every rank must call it.

        Otherwise a kill before the next save would forget the rollback and its skipped steps.
        """
        checkpoint = self.folder / checkpoint_name(position.step)

        def amend() -> None:
            if self.rank == 0:
                manifest = manifests.load_manifest(checkpoint)
                manifest.model_copy(update={"position": position}).save(checkpoint)

        fault = self._disk_fault(amend)
        if fault is not None:
            _logger.error(
                "%s: the rollback is not on record until the next save: %s", checkpoint, fault
            )

    def _write(self, final: Path, position: Position, state: RankState) -> None:
        """Writes the files of all ranks and publishes them as a checkpoint.

        Every rank must call it, perhaps on a background thread.
        """
        unfinished = folders.unfinished(final)
        own = rank_file(unfinished, self.rank)
        files: dict[str, CheckpointFile] = {}

        def begin() -> None:
            if self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)

        def write() -> None:
            write_rank_file(own, state)
            # Hashed by its writer, whose node still has it in the page cache.
            files[own.name] = CheckpointFile(bytes=own.stat().st_size, sha256=file_hash(own))

        def publish() -> None:
            written: dict[str, CheckpointFile] = {}
            for part in all_gathered(files, self._group):
                written.update(part)
            if self.rank == 0:
                manifest = CheckpointManifest(
                    run=self.run, position=position, layout=self.layout, files=written
                )
                manifest.save(unfinished)
                # By rename, which is atomic within a file system: a kill at any moment leaves the
                # whole checkpoint or none.
                folders.publish(unfinished, final)

        # After each part all ranks compare their faults: none may go on to write into a folder that
        # rank 0 could not make, or publish one that lacks a rank's file.
        for work in (begin, write, publish):
            fault = self._disk_fault(work)
            if fault is not None:
                self.failed_saves += 1
                if self.rank == 0:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    _logger.error("%s was not saved (%s)", final, fault)
                return
        if self.rank == 0:
            _logger.info("saved %s", final)
            try:
                self._remove_superseded()
            except OSError as error:
                # The next save tries again.
                _logger.warning("%s: older checkpoints could not be removed: %s", final, error)

    def _remove_superseded(self) -> None:
        """On rank 0: removes older checkpoints, and those that a rollback made void."""
        checkpoint_at = {folders.step_of(path): path for path in all_checkpoints(self.folder)}
        superseded = folders.superseded(
            list(checkpoint_at),
            self.settings.keep_last,
            self.settings.keep_every_steps,
            self.rollback_steps,
        )
        for step in superseded:
            folders.discard(checkpoint_at[step])
        for path in self.folder.glob(f"step_*{folders.ROLLED_BACK}*"):
            folders.discard(path)

    def _disk_fault(self, work: Callable[[], object]) -> str | None:
        """Runs `work` on every rank; returns the fault of the first rank that had one, or None.

        A fault is an OSError, or a checkpoint that cannot be read.
        """
        own_fault: str | None = None
        try:
            work()
        except (OSError, CheckpointError) as error:
            reason = getattr(error, "strerror", None) or error
            own_fault = f"rank {self.rank} on {socket.gethostname()}: {reason}"
        for fault in all_gathered(own_fault, self._group):
            if fault is not None:
                return fault
        return None

    def _next_candidate(
        self, before: int | None, damaged: tuple[Path, str] | None
    ) -> tuple[Path, CheckpointManifest] | None:
        """On rank 0: renames the `damaged` checkpoint, and returns the next one to try."""
        # Read first: `latest` may name the one that is renamed now.
        named = named_checkpoint(self.folder)
        if damaged is not None:
            checkpoint, damage = damaged
            aside = folders.quarantine(checkpoint)
            _logger.warning("%s; renamed to %s, trying the one before", damage, aside.name)
        found = folders.candidates(self.folder)
        if before is not None:
            found = [checkpoint for checkpoint in found if folders.step_of(checkpoint) < before]
        elif found:
            if damaged is None and found[0] != named:
                _logger.warning(
                    "%s names no checkpoint; trying %s", self.folder / LATEST, found[0].name
                )
        elif named is not None or any(self.folder.glob(f"step_*{folders.DAMAGED}*")):
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole; the damaged ones end in "
                f"{folders.DAMAGED}. Copy a whole one back, or name another `folder` in the "
                "configuration to train from step 0"
            )
        if not found:
            return None
        try:
            manifest = manifests.load_manifest(found[0])
        except DamagedCheckpointError as damage:
            return self._next_candidate(before, (found[0], str(damage)))
        manifests.check_same_run(manifest, found[0], self.run)
        return found[0], manifest

    def _examine(self, checkpoint: Path, manifest: CheckpointManifest) -> str | None:
        """Checks this rank's share of the files of `checkpoint`; returns what is damaged."""
        # Each file is hashed by one rank: all of them by all ranks would read the checkpoint
        # world_size times from a shared file system.
        own_share = sorted(manifest.files)[self.rank :: self.world_size]
        try:
            for name in own_share:
                manifests.check_file(manifest, checkpoint, name)
        except DamagedCheckpointError as damage:
            return str(damage)
        return None

    def _restore(
        self, engine_after: EngineAfter, checkpoint: Path, manifest: CheckpointManifest
    ) -> None:
        _logger.info("resuming from %s", checkpoint)
        if manifest.layout != self.layout:
            _logger.info("it was written at another layout: %s", manifest.layout)
        unknown = manifests.not_recorded(manifest)
        if unknown:
            _logger.info(
                "an earlier version wrote it without a record of %s: not compared",
                " and ".join(unknown),
            )
        # One rank lists the headers of all files; at a thousand ranks, a million small reads
        # otherwise.
        index = broadcast_from_rank0(partial(read_index, checkpoint))
        engine = engine_after(manifest.position.step, index)

        def read() -> dict[str, Tensor]:
            engine.restore(index)
            if self.rank == 0:
                # Newer checkpoints are of a future that is now undone: a later resume must not find
                # them.
                folders.rollback_to(checkpoint)
            # With more ranks than at the save, the additional ones take other ranks' states.
            return read_random_state(checkpoint, self.rank % manifest.layout.world_size)

        random_state = run_on_all_ranks(read)
        engine.publish_restored(manifest.position.step)
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Starts `work` on a thread.

    The function returned waits for its end, and raises what it raised.
    """
    done: Future[None] = Future()

    def guarded() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as fault:  # noqa: BLE001  # raised on the main thread
            done.set_exception(fault)

    # A daemon, unlike an executor's: a process that fails must not wait for a thread that waits
    # for another rank.
    threading.Thread(target=guarded, name="checkpoint writer", daemon=True).start()
    return done.result
