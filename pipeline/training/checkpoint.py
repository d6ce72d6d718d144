"""Checkpoints: the base by reference, whole or not there, the newest named by `latest`.

A checkpoint is written to a hidden folder and renamed when every file of every rank is on the disk and hashed; only
then does `latest` name it, and only after that do older ones go. A run killed at any instant finds a whole one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint.manifest import FileRecord, LayoutRecord, Manifest, Position, RunRecord
from pipeline.checkpoint.torch_files import open_torch_file, write_torch_file
from pipeline.errors import CheckpointError
from pipeline.files import file_hash, sync, write_text
from pipeline.training.background import Background, HostCopies
from pipeline.training.engine import Engine
from pipeline.training.launch import COLLECTIVE_TIMEOUT
from pipeline.training.unison import in_unison

LATEST = "latest"
_PREFIX = "step_"
_logger = log.get_logger(__name__)


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(
        self, folder: Path, run: RunRecord, layout: LayoutRecord, *, keep_last: int, asynchronous: bool = False
    ) -> None:
        """Every rank must make one. `asynchronous`: `save` returns when the state is copied to the host's memory."""
        self.folder = folder
        self.run = run
        self.layout = layout
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Of its own: a thread that saves must not mix its messages with the training's.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._background = Background()

    def save(self, engine: Engine, position: Position) -> Path:
        """Writes a checkpoint of `engine`; every rank must call it. Returns its folder.

        An asynchronous one is whole when `finish` returns, or the next `save`.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.finish()
        final = self.folder / f"{_PREFIX}{position.step:08d}"
        partial = final.with_name(f".{final.name}.partial")
        self._on_first_rank(lambda: _make_empty(partial))
        random_state = partial / _random_state_file(self.rank)
        if self.asynchronous:
            copies = HostCopies()
            engine.save(partial, copies.add)
            copies.add(random_state, _random_state())
            self._background.start(lambda: self._complete(copies, position, partial, final))
        else:
            engine.save(partial, write_torch_file)
            write_torch_file(random_state, _random_state())
            self._seal(position, partial, final)
        return final

    def finish(self) -> None:
        """Waits until what was begun is whole; every rank must call it before it leaves.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self._background.finish()
        except OSError as error:
            raise CheckpointError(f"{self.folder}: the last checkpoint could not be written: {error}") from None

    def _complete(self, copies: HostCopies, position: Position, partial: Path, final: Path) -> None:
        """What the thread of an asynchronous save does."""
        fault: str | None = None
        try:
            copies.write()
        except OSError as error:
            fault = f"rank {self.rank}: {error}"
        faults: list[str | None] = [None] * self.world_size
        dist.all_gather_object(faults, fault, group=self._group)
        if said := [one for one in faults if one is not None]:
            raise CheckpointError(f"{final}: could not be written ({said[0]}); the checkpoint before it is whole")
        self._seal(position, partial, final)

    def _seal(self, position: Position, partial: Path, final: Path) -> None:
        """Makes a checkpoint of the files that all ranks have written."""
        dist.barrier(group=self._group)
        files = self._hash([partial / name for name in self._names_in(partial)])
        manifest = Manifest(
            run=self.run, position=position, layout=self.layout, versions=manifests.versions(), files=files
        )
        self._on_first_rank(lambda: self._publish(manifest, partial, final))

    def resume(self, engine: Engine, checkpoint: Path) -> Position:
        """Restores `engine` from a whole checkpoint of this run, of whatever layout; every rank must call it.

        Raises:
            CheckpointError: it is damaged, or belongs to another base or run.
        """
        manifest = in_unison(lambda: self._checked(checkpoint))
        if manifest.layout != self.layout:
            _logger.info("%s was written by another layout: %s", checkpoint, manifest.layout)
        engine.load(checkpoint, manifest.position.step)
        # A rank that the checkpoint does not know takes up the state of one that it does.
        writer = self.rank % manifest.layout.world_size
        _restore_random_state(in_unison(lambda: open_torch_file(checkpoint / _random_state_file(writer))))
        return manifest.position

    def _checked(self, checkpoint: Path) -> Manifest:
        manifest = manifests.load_manifest(checkpoint)
        manifests.check_same_run(manifest, checkpoint, self.run)
        for name in self._share(sorted(manifest.files)):
            manifests.check_file(manifest, checkpoint, name)
        return manifest

    def _names_in(self, folder: Path) -> list[str]:
        """The files in `folder` as the first rank sees them: the others may see them later."""
        names = [sorted(path.name for path in folder.iterdir() if path.is_file()) if self.rank == 0 else []]
        dist.broadcast_object_list(names, src=0, group=self._group)
        return names[0]

    def _hash(self, paths: list[Path]) -> dict[str, FileRecord]:
        """Every file's size and hash; the ranks share the work."""
        own = {path.name: (path.stat().st_size, file_hash(path)) for path in self._share(paths)}
        parts: list[dict[str, tuple[int, str]]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(parts, own, group=self._group)
        merged = {name: record for part in parts for name, record in part.items()}
        return {name: FileRecord(bytes=size, sha256=digest) for name, (size, digest) in sorted(merged.items())}

    def _share(self, items: list[Path] | list[str]) -> list:  # type: ignore[type-arg]
        return items[self.rank :: self.world_size]

    def _publish(self, manifest: Manifest, partial: Path, final: Path) -> None:
        manifest.save(partial)
        if final.exists():
            _discard(final)  # a run that was killed before `latest` named it took the same steps again
        partial.rename(final)
        sync(self.folder)
        write_text(self.folder / LATEST, final.name + "\n")
        # Later ones, of an attempt that was rolled back, stay until a save takes their place.
        up_to_now = [path for path in whole_checkpoints(self.folder) if path.name <= final.name]
        for old in up_to_now[: -self.keep_last]:
            _discard(old)
        _logger.info("saved %s", final)

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        if self.rank == 0:
            work()
        dist.barrier(group=self._group)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where nothing was saved yet.

    Raises:
        CheckpointError: `latest` names something else than a checkpoint of this folder.
    """
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if Path(name).name != name or not name.startswith(_PREFIX) or not (folder / name / manifests.NAME).exists():
        raise CheckpointError(
            f"{folder / LATEST}: names {name!r}, which is no whole checkpoint there; write the name of one that is, "
            f"of {', '.join(path.name for path in whole_checkpoints(folder)) or 'which there are none'}"
        )
    return folder / name


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{_PREFIX}*/{manifests.NAME}"))


def remove_unfinished(folder: Path) -> None:
    """Clears what killed processes left half-written or half-deleted."""
    for path in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _discard(folder: Path) -> None:
    """Removes a checkpoint. It loses its name first, so that a kill cannot leave half of it behind as a whole one."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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
