"""The attempts at a run, recorded in its folder, and whether a failed one is retried.

Three kinds of lines are appended: a serial stage starts, training starts, a stage ends. A killed attempt has no end,
unless the script that started it appends one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.config.sources import RUN_FILE
from pipeline.errors import (
    FINISHED,
    FOLDER_TAKEN,
    INTERRUPTED,
    RESUME_LATER,
    USER_ERROR,
    exit_code_of,
    in_one_line,
    worth_another_attempt,
)
from pipeline.log import node
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step
from pipeline.run_folder.lock import LockOwner, RunLock
from pipeline.run_folder.run_file import write_run

NAME = "attempts.jsonl"
_logger = log.get_logger(__name__)


def this_attempt() -> str:
    """This attempt's name, `<series>.<number>`, from the script that started it or Slurm's job and restart."""
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return os.environ.get("ATTEMPT") or (f"{job}.{restart}" if job else f"{socket.gethostname()}-{os.getpid()}.0")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)

    attempt: str = Field(default_factory=this_attempt)


class StageStart(_Record):
    """A serial stage starts in the process `by`. Training's process is in the lock instead."""

    stage: str
    by: LockOwner


class TrainingStart(_Record):
    """An attempt starts to train at `step`; `checkpoint_step` is the newest checkpoint's.

    `changed` are the settings that differ from those of the attempt before: theirs, and now.
    """

    node: str = Field(default_factory=node)
    time: float = Field(default_factory=time)
    world_size: int
    step: int
    steps: int
    tokens_per_step: int
    checkpoint_step: int
    changed: dict[str, tuple[Any, Any]] = {}


class Decision(NamedTuple):
    """Whether there is another attempt, and the reason, for messages."""

    again: bool
    why: str


class StageEnd(_Record):
    """A stage ended after `step`. `step` and `retry` are None where unknown."""

    stage: str
    time: float = Field(default_factory=time)
    exit_code: int
    step: int | None
    checkpoint_step: int
    error: str | None
    retry: Decision | None = None


_RECORD: TypeAdapter[StageEnd | TrainingStart | StageStart] = TypeAdapter(StageEnd | TrainingStart | StageStart)


@dataclass
class Attempt:
    """All lines of one attempt: its last stage, and its training."""

    name: str
    began: StageStart | None = None
    started: TrainingStart | None = None
    ended: StageEnd | None = None

    @property
    def series(self) -> str:
        """The part of the name that all attempts of a job share, its Slurm number, or of a call of a script."""
        return self.name.rpartition(".")[0]

    @property
    def number(self) -> int:
        """Its number in the series: how many restarts came before it."""
        digits = self.name.rpartition(".")[2]
        return int(digits) if digits.isdecimal() else 0

    @property
    def stage(self) -> str:
        """The last stage that it reached."""
        record = self.ended or self.began
        return record.stage if record else "train"

    @property
    def is_excused(self) -> bool:
        """Whether it may bring no checkpoint: a serial stage that was killed, or resumes where a signal stopped it."""
        if self.started is not None:
            return False
        resumes = ("clean", "tokenize", "sample")
        return self.ended is None or (self.ended.stage in resumes and self.ended.exit_code == RESUME_LATER)


def record_start(config: RunConfig, world_size: int, step: int) -> None:
    """Records that this attempt starts to train, after `step` steps, and the run that it trains."""
    changed = {}
    try:
        if changed := write_run(config):
            _logger.info("changed: %s", ", ".join(f"{key} {old} → {new}" for key, (old, new) in changed.items()))
    except OSError as error:  # a full disk must not end the work
        _logger.error("%s: this run is not recorded: %s", config.folder / RUN_FILE, error.strerror)
    started = TrainingStart(
        world_size=world_size,
        step=step,
        steps=config.schedule.steps,
        tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
        checkpoint_step=newest_checkpoint_step(config.folder),
        changed=changed,
    )
    _append(config.folder, started)


def record_end(
    folder: Path,
    *,
    exit_code: int,
    step: int | None = None,
    error: str | None = None,
    stage: str = "train",
    retry: Decision | None = None,
) -> None:
    """Records how `stage` ended in this attempt. Without an `error`, the error recorded before stays."""
    own = this_attempt()
    before = next((attempt.ended for attempt in read_attempts(folder) if attempt.name == own), None)
    if error is None and before is not None and exit_code != FINISHED:
        error, step = before.error, before.step
    saved = newest_checkpoint_step(folder)
    _append(
        folder, StageEnd(stage=stage, exit_code=exit_code, step=step, checkpoint_step=saved, error=error, retry=retry)
    )


def _append(folder: Path, record: _Record) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A single write to a file opened for appending: lines of several processes do not mix.
        with (folder / NAME).open("a+b", buffering=0) as file:
            cut_short = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            file.write(b"\n" * cut_short + record.model_dump_json().encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        if exit_code_of(error) == USER_ERROR and not isinstance(record, StageEnd):
            raise  # nothing else could be written there either
        # A full disk must not end the work.
        _logger.error("%s: this attempt is not recorded: %s", folder / NAME, error.strerror)


def read_attempts(folder: Path) -> list[Attempt]:
    """The attempts at the run in `folder`, the one with the newest line last; none where they cannot be read.

    It omits lines that a kill cut short, and attempts that were refused because another job was using the folder.
    """
    attempts: dict[str, Attempt] = {}
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        _logger.error("%s: cannot be read (%s); move it away", folder / NAME, error.strerror)
        lines = []
    for line in lines:
        try:
            record = _RECORD.validate_json(line)
        except ValidationError:
            continue
        attempt = attempts.pop(record.attempt, None) or Attempt(name=record.attempt)
        attempts[record.attempt] = attempt
        if isinstance(record, StageEnd):
            attempt.ended = record
        elif isinstance(record, TrainingStart):
            attempt.began, attempt.started, attempt.ended = None, record, None
        else:
            attempt.began, attempt.ended = record, None
    return [one for one in attempts.values() if one.ended is None or one.ended.exit_code != FOLDER_TAKEN]


def count_restarts(attempts: Iterable[Attempt], *starting: str) -> int:
    """How often training restarted: the attempts that trained, and those `starting` now, minus the first."""
    return max(0, len({attempt.name for attempt in attempts if attempt.started is not None} | {*starting}) - 1)


def decide(folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int) -> Decision:
    """Decides whether the attempt that just ended in `stage` of the run in `folder` is retried, and records it.

    A series has at most `most` restarts, of which at most `without_progress` in a row bring no newer checkpoint. An
    attempt that saved and stopped counts like a failed one, so that a stage too long for a job's time limit ends.
    """
    restarts = Attempt(this_attempt()).number
    idle = _idle_attempts(folder, stage, exit_code)
    again, why = False, f"restart {restarts + 1}, {idle} of at most {without_progress} without progress"
    if not worth_another_attempt(exit_code):
        why = "its cause must be fixed first"
    elif restarts >= most:
        why = f"it was restarted {restarts} times, and MAX_RESTARTS is {most}"
    elif idle > without_progress:
        limit = f"MAX_RESTARTS_WITHOUT_PROGRESS is {without_progress}"
        why = f"{idle} attempt(s) in a row brought no newer checkpoint, and {limit}"
    else:
        again = True
    decision = Decision(again, why)
    record_end(folder, exit_code=exit_code, stage=stage, retry=decision)
    return decision


def _idle_attempts(folder: Path, stage: str, exit_code: int) -> int:
    """How many attempts in a row, up to the one that just ended, brought no newer checkpoint.

    They are counted by their numbers, those that left no line too: a disk that takes no records ends a run as well.
    """
    own, newest = Attempt(this_attempt()), newest_checkpoint_step(folder)
    attempts = {attempt.number: attempt for attempt in read_attempts(folder) if attempt.series == own.series}
    ended = StageEnd(stage=stage, exit_code=exit_code, step=None, checkpoint_step=newest, error=None)
    attempts.setdefault(own.number, own).ended = ended
    idle = 0
    for number in range(own.number, -1, -1):
        attempt = attempts.get(number)
        record = attempt and (attempt.started or attempt.ended)
        if record and record.checkpoint_step < newest:
            break
        idle += attempt is None or not attempt.is_excused
    return idle


@contextmanager
def stage_of(config: RunConfig | None, stage: str, *, alone: bool = False) -> Iterator[None]:
    """Runs the block as a serial stage of the run `config`; without `config` it is of no run.

    A run's first stage writes `run.yaml`, at the latest when it is done. Start and end are recorded if a script, which
    sets ATTEMPT, started the stage. `alone`: takes the stage's lock; raises FolderTakenError where another has it.
    """
    if config is None:
        yield
        return
    recorded = _recorded(stage, config.folder) if "ATTEMPT" in os.environ else nullcontext()
    with recorded, RunLock(config.folder, stage) if alone else nullcontext():
        yield
        begin_run(config)


def begin_run(config: RunConfig) -> None:
    """Writes `run.yaml`, unless it is there: a stage that takes hours calls this once its checks have passed."""
    if not (config.folder / RUN_FILE).exists():
        write_run(config)


def record_stage(folder: Path, stage: str) -> None:
    """Records that a serial stage starts in this process."""
    _append(folder, StageStart(stage=stage, by=LockOwner.this_process()))


@contextmanager
def _recorded(stage: str, folder: Path) -> Iterator[None]:
    record_stage(folder, stage)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        code, said = (INTERRUPTED, None) if interrupted else (exit_code_of(error), in_one_line(error))
        record_end(folder, stage=stage, exit_code=code, error=said)
        raise
    record_end(folder, stage=stage, exit_code=FINISHED)
