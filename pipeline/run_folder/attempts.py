"""The attempts at a run, recorded in its folder: a line when a stage starts, and one when it ends.

A killed attempt has no end, unless the script that started it appends one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import time
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.config.sources import RUN_FILE
from pipeline.config.stage_plan import training_stages
from pipeline.errors import (
    FINISHED,
    FOLDER_TAKEN,
    RESUME_LATER,
    USER_ERROR,
    exit_code_of,
)
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step
from pipeline.run_folder.lock import LockOwner
from pipeline.run_folder.run_file import write_run

NAME = "attempts.jsonl"
_RESUMING = ("clean", "tokenize", "sample")
"""Serial stages that a signal stops and the next attempt continues."""
_logger = log.get_logger(__name__)


def this_attempt() -> str:
    """This attempt's name, `<series>.<number>`.

    It is what the script that started it says, or Slurm's job and restart, or this process.
    """
    attempt = os.environ.get("ATTEMPT")
    if attempt:
        return attempt
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return f"{socket.gethostname()}-{os.getpid()}.0"


class Decision(NamedTuple):
    """Whether there is another attempt, and the reason, for messages."""

    again: bool
    why: str


class _StageRecord(BaseModel):
    """A line of attempts.jsonl; `checkpoint_step` is the step of the newest checkpoint."""

    model_config = ConfigDict(frozen=True)

    attempt: str = Field(default_factory=this_attempt)
    time: float = Field(default_factory=time)
    stage: str
    checkpoint_step: int


class StageOfTraining(BaseModel):
    """A stage of a run that trains in stages: it ends when `end_step` steps of the run are done."""

    name: str
    end_step: int
    tokens_per_step: int


class Training(BaseModel):
    """What an attempt trains, from `step` on.

    Attributes:
        tokens_per_step: of the first stage, where the run has several.
        stages: empty for a run without stages, and in a record of an earlier version.
        changed: the lines of run.yaml that this attempt changed, with - or +.
    """

    world_size: int
    step: int
    steps: int
    tokens_per_step: int
    stages: tuple[StageOfTraining, ...] = ()
    changed: tuple[str, ...] = ()

    def tokens_after(self, step: int) -> int:
        """How many tokens the first `step` steps have."""
        tokens = 0
        done = 0
        for stage in self.stages:
            steps = max(0, min(step, stage.end_step) - done)
            tokens += steps * stage.tokens_per_step
            done += steps
        return tokens + (step - done) * self.tokens_per_step

    def stage_at(self, step: int) -> str | None:
        """The number and the name of the stage that does the step `step`, counted from 1."""
        for number, stage in enumerate(self.stages, start=1):
            if step <= stage.end_step:
                return f"{number} of {len(self.stages)}, {stage.name}"
        return None


class StageStart(_StageRecord):
    """A stage starts in the process `by`."""

    by: LockOwner
    training: Training | None = None


class StageEnd(_StageRecord):
    """A stage ended, training after `step`; what is None is unknown."""

    exit_code: int
    step: int | None = None
    error: str | None = None
    retry: Decision | None = None


_RECORD: TypeAdapter[StageEnd | StageStart] = TypeAdapter(StageEnd | StageStart)


@dataclass
class Attempt:
    """What the lines of one attempt say.

    Attributes:
        checkpoint_step: the step of the newest checkpoint when the attempt began.
        start, end: the start and end of its last stage.
        training: what it trains, if it has begun to.
    """

    name: str
    checkpoint_step: int
    start: StageStart | None = None
    end: StageEnd | None = None
    training: Training | None = None

    @property
    def needs_no_checkpoint(self) -> bool:
        """Whether it may end without a newer checkpoint, and does not count as one in vain.

        It may if it was a serial stage that was killed, or that continues where a signal stopped
        it.
        """
        if self.training is not None:
            return False
        if self.end is None:
            return True
        return self.end.stage in _RESUMING and self.end.exit_code == RESUME_LATER

    @property
    def newest_checkpoint_step(self) -> int:
        """The step of the newest checkpoint, of all that its lines say."""
        newest = max(self.checkpoint_step, 0)
        for line in (self.start, self.end):
            if line is not None:
                newest = max(newest, line.checkpoint_step)
        return newest

    def add(self, record: StageStart | StageEnd) -> None:
        """Adds the next of its lines."""
        if isinstance(record, StageEnd):
            self.end = record
            return
        self.start = record
        self.end = None
        # A later stage of the same attempt, such as the conversion, trains nothing.
        if record.training is not None:
            self.training = record.training


def series_and_number(attempt: str) -> tuple[str, int]:
    """The parts of an attempt's name.

    The series is common to all attempts of a job, or of a call of a script; the number says how
    many restarts came before.
    """
    series, _, number = attempt.rpartition(".")
    if not number.isdecimal():
        return series, 0
    return series, int(number)


def record_training(config: RunConfig, world_size: int, step: int) -> None:
    """Records that this attempt starts to train, after `step` steps, and the run that it trains."""
    changed: tuple[str, ...] = ()
    try:
        changed = write_run(config)
    except OSError as error:
        # A full disk must not end the work.
        _logger.error("%s: this run is not recorded: %s", config.folder / RUN_FILE, error.strerror)
    plan = training_stages(config)
    stages: list[StageOfTraining] = []
    for stage in plan if config.stages else ():
        stages.append(
            StageOfTraining(
                name=stage.name, end_step=stage.end_step, tokens_per_step=stage.tokens_per_step
            )
        )
    training = Training(
        world_size=world_size,
        step=step,
        steps=config.schedule.steps,
        tokens_per_step=plan[0].tokens_per_step,
        stages=tuple(stages),
        changed=changed,
    )
    record_start(config.folder, "train", training)


def record_start(folder: Path, stage: str, training: Training | None = None) -> None:
    """Records that `stage` starts in this attempt, in this process."""
    _append(
        folder,
        StageStart(
            stage=stage,
            checkpoint_step=newest_checkpoint_step(folder),
            by=LockOwner.this_process(),
            training=training,
        ),
    )


def record_end(
    folder: Path,
    *,
    exit_code: int,
    step: int | None = None,
    error: str | None = None,
    stage: str = "train",
    retry: Decision | None = None,
) -> None:
    """Records how `stage` ended in this attempt.

    Without an `error`, the error and the step that were recorded before stay.
    """
    if error is None and exit_code != FINISHED:
        for attempt in read_attempts(folder):
            if attempt.name == this_attempt() and attempt.end is not None:
                error = attempt.end.error
                step = attempt.end.step
    _append(
        folder,
        StageEnd(
            stage=stage,
            checkpoint_step=newest_checkpoint_step(folder),
            exit_code=exit_code,
            step=step,
            error=error,
            retry=retry,
        ),
    )


def _append(folder: Path, record: _StageRecord) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that a record is one system call.
        with (folder / NAME).open("a+b", buffering=0) as file:
            line = record.model_dump_json().encode() + b"\n"
            if _is_cut_short(file):
                line = b"\n" + line
            # A single write to a file opened for appending: lines of several processes do not mix.
            file.write(line)
            os.fsync(file.fileno())
    except OSError as error:
        if isinstance(record, StageStart) and exit_code_of(error) == USER_ERROR:
            raise  # nothing else could be written there either
        # A full disk must not end the work.
        _logger.error("%s: this attempt is not recorded: %s", folder / NAME, error.strerror)


def _is_cut_short(file: FileIO) -> bool:
    """Whether a kill left the last line without its end."""
    length = file.seek(0, os.SEEK_END)
    if length == 0:
        return False
    return os.pread(file.fileno(), 1, length - 1) != b"\n"


def read_attempts(folder: Path) -> list[Attempt]:
    """The attempts at the run in `folder`, the one with the newest line last.

    Where the file cannot be read there are none. Left out are lines that a kill cut short, and
    attempts that were refused because another job was using the folder.
    """
    lines: list[bytes] = []
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.error("%s: cannot be read (%s); move it away", folder / NAME, error.strerror)

    attempts: dict[str, Attempt] = {}
    for line in lines:
        try:
            record = _RECORD.validate_json(line)
        except ValidationError:
            continue
        # Taken out and put back: the order is that of the newest lines.
        attempt = attempts.pop(record.attempt, None)
        if attempt is None:
            attempt = Attempt(record.attempt, record.checkpoint_step)
        attempt.add(record)
        attempts[record.attempt] = attempt

    found = []
    for attempt in attempts.values():
        was_refused = attempt.end is not None and attempt.end.exit_code == FOLDER_TAKEN
        if not was_refused:
            found.append(attempt)
    return found
