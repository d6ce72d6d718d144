"""Small real runs for the faults, and an undisturbed run of each shape to compare them with."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.local_ranks import reserved_port
from pipeline.run_folder.metrics import METRICS, read_metrics
from tests.distributed import processes, run_ranks
from tests.training.faults import train_without
from tests.training.runs import make_run, make_tokens, metrics, write_config
from tests.waiting import PATIENCE_S, wait_until

RANKS = 2
_COUNTS = ("failed_saves", "recomputed_steps")
_STEP = re.compile(r" training: \d+ of \d+ steps ")
_RESUMED = re.compile(r"resuming from \S*step_(\d+)")


class TrialError(AssertionError):
    """A fault did not happen, or the run did not recover from it."""


def await_that(condition: Callable[[], bool], what: str) -> None:
    """Waits until `condition` holds; raises TrialError if it does not in time."""
    if not wait_until(condition, every_s=0.02):
        raise TrialError(f"not seen in {PATIENCE_S:.0f} s: {what}")


@dataclass(frozen=True)
class Shape:
    """What makes one run's figures differ from another's."""

    zero_stage: int
    steps: int
    save_every: int
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int


BRIEF = Shape(1, steps=40, save_every=8, sequence_length=64, global_batch_size=16, micro_batch_size=4)
"""Some 4 s of steps."""
LASTING = Shape(3, steps=48, save_every=8, sequence_length=256, global_batch_size=64, micro_batch_size=8)
"""Some 70 s of steps, for faults that Slurm notices after half a minute."""


@dataclass(frozen=True)
class Run:
    """A run, observed through its folder."""

    folder: Path
    config: Path
    shape: Shape

    @property
    def step(self) -> int:
        """The last logged step."""
        lines = read_metrics(self.folder / METRICS)
        return int(lines[-1]["step"]) if lines else 0

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The complete checkpoints by step, oldest first."""
        whole = sorted(path.parent for path in self.folder.glob("checkpoints/step_*/manifest.json"))
        return {int(path.name.removeprefix("step_")): path for path in whole if path.suffix == ""}

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint that `latest` names, 0 without one; a newer complete one may not be named yet."""
        try:
            return int((self.folder / "checkpoints" / "latest").read_text(encoding="utf-8").removeprefix("step_"))
        except FileNotFoundError:
            return 0

    @property
    def unfinished_saves(self) -> set[int]:
        """The inodes of unfinished saves, those of killed attempts included."""
        inodes = set()
        for folder in self.folder.glob("checkpoints/.step_*"):
            with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                inodes.add(folder.stat().st_ino)
        return inodes

    @property
    def is_done(self) -> bool:
        """Whether all steps are trained."""
        return (self.folder / "training.json").exists()

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.folder / "output.log"

    @property
    def output(self) -> str:
        """The output of all attempts."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    @property
    def resumed_steps(self) -> list[int]:
        """The step from which each attempt with a checkpoint resumed."""
        return [int(step) for step in _RESUMED.findall(self.output)]

    @property
    def figures(self) -> list[dict[str, float]]:
        """The metrics of every step, without timing and counts of faults."""
        return [{name: value for name, value in line.items() if name not in _COUNTS} for line in metrics(self.folder)]

    def trains_again(self, printed_before: int) -> bool:
        """Whether a new attempt has trained a step, by the output after `printed_before` characters."""
        return _STEP.search(self.output, printed_before) is not None


@contextlib.contextmanager
def local_ranks(run: Run) -> Iterator[list[Any]]:
    """An attempt of a run: its ranks as processes of this machine, which leaving the block kills.

    They run the same program as slurm/launch.sh, in the same environment, forked from a server that has imported
    everything: training starts after a second.
    """
    with reserved_port() as port:
        ranks = [processes.Process(target=_train, args=(run, rank, port), daemon=True) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            yield ranks
        finally:
            kill(ranks)


def _train(run: Run, rank: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    descriptor = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["pipeline.train", str(run.config)]
    runpy.run_module("pipeline.train", run_name="__main__", alter_sys=True)


def kill(ranks: Sequence[Any]) -> bool:
    """Kills these ranks; returns False if all of them had already ended."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()
    return any(process.exitcode == -signal.SIGKILL for process in ranks)


def have_ended(ranks: Sequence[Any], timeout_s: float = 0.0) -> bool:
    """Waits at most `timeout_s` for all ranks; returns whether they ended."""
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode is not None for process in ranks)


def finish(run: Run, ranks: Sequence[Any]) -> None:
    """Waits for the end of a run; raises TrialError if a rank failed."""
    have_ended(ranks, PATIENCE_S)
    if any(process.exitcode != 0 for process in ranks):
        raise TrialError(f"{run.folder}: ended with {[process.exitcode for process in ranks]}\n{run.output}")


@dataclass
class Laboratory:
    """A folder with the tokens, the initial expansion and the undisturbed runs, which all runs share."""

    folder: Path
    _undisturbed: dict[tuple[Shape, tuple[int, ...]], tuple[Run, float]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        make_tokens(self.folder / "tokens")
        make_run(self.folder, self.folder / "tokens")
        warm = processes.Process(target=int)  # the server finishes its imports: no run waits for them
        warm.start()
        warm.join()

    def new_run(self, shape: Shape, **changes: Any) -> Run:
        """A run ready to train; `changes` as in `tests.training.runs.write_config`."""
        folder = self.folder / f"run-{next(self._numbers)}"
        config = write_config(
            folder,
            self.folder / "tokens",
            zero=shape.zero_stage,
            name="run.yaml",
            upscaled=str(self.folder / "upscaled"),
            data__sequence_length=shape.sequence_length,
            schedule__steps=shape.steps,
            schedule__global_batch_size=shape.global_batch_size,
            schedule__micro_batch_size=shape.micro_batch_size,
            validation={"every_steps": shape.steps // 2, "max_sequences": 5},
            **{"checkpoints__every_steps": shape.save_every, **changes},
        )
        return Run(folder, config, shape)

    def undisturbed(self, shape: Shape, skipped: tuple[int, ...] = ()) -> tuple[Run, float]:
        """The run of that shape without faults, optionally without some steps, and its seconds; trained once."""
        if (shape, skipped) not in self._undisturbed:
            run, began = self.new_run(shape), time.monotonic()
            if skipped:
                run_ranks(train_without, RANKS, run.config, *skipped, timeout_s=PATIENCE_S)
            else:
                with local_ranks(run) as ranks:
                    finish(run, ranks)
            self._undisturbed[shape, skipped] = run, time.monotonic() - began
        return self._undisturbed[shape, skipped]

    def is_undisturbed(self, run: Run, skipped: tuple[int, ...] = ()) -> bool:
        """Whether the run logged every step once, with the metrics of the undisturbed run, bit for bit."""
        figures = run.figures
        trained = [line["step"] for line in figures if "loss" in line]
        expected = [step for step in range(1, run.shape.steps + 1) if step not in skipped]
        return trained == expected and figures == self.undisturbed(run.shape, skipped)[0].figures
