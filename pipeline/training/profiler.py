"""Traces a few steps with torch.profiler, for chrome://tracing, Perfetto or TensorBoard."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline import log
from pipeline.config.observation import Profile
from pipeline.errors import ConfigError
from pipeline.files import published_file

FOLDER = "profile"
_logger = log.get_logger(__name__)


def check_ranks(settings: Profile, world_size: int) -> None:
    """Raises ConfigError where a rank that is to be traced does not exist."""
    if settings.steps is not None and max(settings.ranks, default=0) >= world_size:
        raise ConfigError(
            f"profile.ranks: rank {max(settings.ranks)} of {world_size} ranks; they count from 0, name those that exist"
        )


class Profiler:
    """Traces the steps that the settings name, if this `rank` is among theirs; else it does nothing."""

    def __init__(self, settings: Profile, folder: Path, rank: int, device: torch.device) -> None:
        first, last = settings.steps or (1, 0)
        self._steps = range(first, last + 1) if rank in settings.ranks else range(0)
        self._folder = folder / FOLDER
        if settings.steps is not None:
            ranks = ", ".join(map(str, settings.ranks))
            _logger.info("traces steps %d to %d of rank(s) %s into %s", first, last, ranks, self._folder)
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._path = self._folder

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """The block takes `step`, counted from 1."""
        if step not in self._steps:
            self.close()  # the run has gone back to before these steps
            yield
            return
        if self._running is None:
            self._begin(step)
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Writes what was traced, if anything was."""
        if self._running is None:
            return
        self._running.stop()
        try:
            write_trace(self._running, self._path)
        except OSError as error:  # a disk without room for a trace shall not end the run
            _logger.error("%s: this trace could not be written: %s", self._path, error.strerror or error)
        self._running = None

    def _begin(self, step: int) -> None:
        self._path = self._folder / f"step_{step:08d}.rank_{self._rank:05d}.pt.trace.json.gz"
        self._running = profile(activities=self._activities)
        self._running.start()


def write_trace(trace: profile, path: Path) -> None:
    """Writes a trace that has ended as Chrome's JSON, compressed; `path` is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "trace.json"
        trace.export_chrome_trace(str(plain))
        with plain.open("rb") as whole, published_file(path) as file, gzip.open(file, "wb") as packed:
            shutil.copyfileobj(whole, packed)
