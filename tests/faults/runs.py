"""Small real runs for the faults, and an undisturbed run of each shape to compare them with."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipeline.run_folder.checkpoint_names import named_checkpoint, step_in
from pipeline.run_folder.metrics import METRICS, read_metrics
from tests.distributed import run_ranks
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
    if not wait_until(condition, every_s=0.1):
        raise TrialError(f"not seen in {PATIENCE_S:.0f} s: {what}")


SAVE_EVERY = 8
BRIEF, LASTING, STAGED = "brief", "lasting", "staged"
STAGES: list[dict[str, Any]] = [
    {"name": "norms", "steps": 4, "trains": "norm"},
    {"name": "maps", "steps": 4, "trains": "expansion_to_base", "sequence_length": 32},
    {"name": "all", "steps": 4},
    {"name": "norms_again", "steps": 4, "trains": "norm", "learning_rate": 1.0e-3},
    {"name": "last", "steps": 4, "replay_fraction": 0.5},
]
"""What trains, and what is read, differs from stage to stage: a border has everything to do."""
SHAPES: dict[str, dict[str, Any]] = {
    BRIEF: {
        "zero": 1,
        "schedule__steps": 40,
        "schedule__global_batch_size": 16,
        "schedule__micro_batch_size": 4,
        "data__sequence_length": 64,
    },
    STAGED: {
        "zero": 1,
        "schedule__steps": 20,
        "schedule__global_batch_size": 16,
        "schedule__micro_batch_size": 4,
        "data__sequence_length": 64,
        "stages": STAGES,
    },
    LASTING: {
        "zero": 3,
        "schedule__steps": 48,
        "schedule__global_batch_size": 64,
        "schedule__micro_batch_size": 8,
        "data__sequence_length": 256,
    },
}
"""Some 4 s of steps; the same with borders between stages; some 70 s, for faults that Slurm notices
after half a minute."""


@dataclass(frozen=True)
class Run:
    """A run, observed through its folder."""

    folder: Path
    config: Path
    shape: str

    @property
    def steps(self) -> int:
        """How many it has in all."""
        return SHAPES[self.shape]["schedule__steps"]

    @property
    def borders(self) -> list[int]:
        """The steps at which a stage of it ends, and another begins."""
        stages = SHAPES[self.shape].get("stages", [])
        return list(accumulate(stage["steps"] for stage in stages))[:-1]

    @property
    def step(self) -> int:
        """The last logged step."""
        lines = read_metrics(self.folder / METRICS)
        return int(lines[-1]["step"]) if lines else 0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint that `latest` names, 0 without one; a newer complete one may
        not be named yet."""
        named = named_checkpoint(self.checkpoints)
        return step_in(named.name) or 0 if named else 0

    @property
    def unfinished_saves(self) -> set[int]:
        """The inodes of unfinished saves, those of killed attempts included."""
        inodes = set()
        for folder in self.checkpoints.glob(".step_*"):
            with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                inodes.add(folder.stat().st_ino)
        return inodes

    @property
    def is_done(self) -> bool:
        """Whether all steps are trained."""
        return (self.folder / "training.json").exists()

    @property
    def log(self) -> Path:
        """What its processes print, in all attempts."""
        return self.folder / "output.log"

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def resumed_steps(self) -> list[int]:
        """The step from which each attempt with a checkpoint resumed."""
        return [int(step) for step in _RESUMED.findall(self.output)]

    @property
    def figures(self) -> list[dict[str, float]]:
        """The metrics of every step, without timing and counts of faults."""
        return [
            {name: value for name, value in line.items() if name not in _COUNTS}
            for line in metrics(self.folder)
        ]

    def trains_again(self, printed_before: int) -> bool:
        """Whether a new attempt has trained a step, by the output after `printed_before`
        characters."""
        return _STEP.search(self.output, printed_before) is not None

    def require(self, condition: bool, what: str) -> None:
        """Raises TrialError, with the run's output, if `condition` does not hold."""
        if not condition:
            raise TrialError(f"{self.folder}: {what}\n{self.output}")


class Laboratory:
    """A folder with the tokens, the initial expansion and the undisturbed runs, which all runs
    share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0
        self._undisturbed: dict[tuple[str, tuple[int, ...]], tuple[Run, float]] = {}
        make_tokens(folder / "tokens")
        make_run(folder, folder / "tokens")
        run_ranks(int, 1)  # the server of the ranks finishes its imports: no run waits for them

    def new_run(self, shape: str, **changes: Any) -> Run:
        """A run ready to train; `changes` as in `tests.training.runs.write_config`."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        settings: dict[str, Any] = {
            **SHAPES[shape],
            "init_expansion": str(self.folder / "initial_expansion"),
            "validation": {"every_steps": 20, "max_sequences": 5},
            "checkpoints": {"every_steps": SAVE_EVERY},
        }
        config = write_config(folder, self.folder / "tokens", **settings | changes)
        run = Run(folder, config, shape)
        run.log.touch()
        return run

    def undisturbed(self, shape: str, skipped: tuple[int, ...] = ()) -> tuple[Run, float]:
        """The run of that shape without faults, optionally without some steps, and its seconds;
        trained once."""
        if (shape, skipped) not in self._undisturbed:
            run, began = self.new_run(shape), time.monotonic()
            run_ranks(train_without, RANKS, run.config, *skipped)
            self._undisturbed[shape, skipped] = run, time.monotonic() - began
        return self._undisturbed[shape, skipped]

    def is_undisturbed(self, run: Run, skipped: tuple[int, ...] = ()) -> bool:
        """Whether the run logged every step once, with the metrics of the undisturbed run, bit for
        bit."""
        figures = run.figures
        trained = [line["step"] for line in figures if "loss" in line]
        expected = [step for step in range(1, run.steps + 1) if step not in skipped]
        return trained == expected and figures == self.undisturbed(run.shape, skipped)[0].figures
