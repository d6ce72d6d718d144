"""The attempts at a run, recorded in its folder, and whether a failed one is retried.

A line is appended when a stage starts and when it ends. A killed attempt has no end, unless the
script that started it appends one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import NamedTuple

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
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step
from pipeline.run_folder.lock import LockOwner, RunLock
from pipeline.run_folder.run_file import write_run

NAME = "attempts.jsonl"
_RESUMING = ("clean", "tokenize", "sample")
"""Serial stages that a signal stops and the next attempt continues."""
_logger = log.get_logger(__name__)


def this_attempt() -> str:
    """This attempt's name, `<series>.<number>`, from the script that started it or Slurm's job and
    restart.
    """
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return os.environ.get("ATTEMPT") or (
        f"{job}.{restart}" if job else f"{socket.gethostname()}-{os.getpid()}.0"
    )


class Decision(NamedTuple):
    """Whether there is another attempt, and the reason, for messages."""

    again: bool
    why: str


class _StageRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    attempt: str = Field(default_factory=this_attempt)
    time: float = Field(default_factory=time)
    stage: str
    checkpoint_step: int
    """the newest checkpoint's"""


class Training(BaseModel):
    """What an attempt trains, from `step` on."""

    world_size: int
    step: int
    steps: int
    tokens_per_step: int


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
    """What the lines of one attempt say: its last stage's start and end, and its training.

    `checkpoint_step` is that of its first line.
    """

    name: str
    checkpoint_step: int
    start: StageStart | None = None
    end: StageEnd | None = None
    training: Training | None = None

    @property
    def is_excused(self) -> bool:
        """Whether it may bring no checkpoint: a serial stage that was killed, or resumes where a
        signal stopped it.
        """
        if self.training is not None:
            return False
        return self.end is None or (
            self.end.stage in _RESUMING and self.end.exit_code == RESUME_LATER
        )

    @property
    def newest_checkpoint_step(self) -> int:
        """The newest checkpoint's, of all that its lines say."""
        lines = [line.checkpoint_step for line in (self.start, self.end) if line is not None]
        return max(self.checkpoint_step, *lines, 0)

    def add(self, record: StageStart | StageEnd) -> None:
        if isinstance(record, StageEnd):
            self.end = record
        else:
            self.start, self.end, self.training = record, None, record.training or self.training


def series_and_number(attempt: str) -> tuple[str, int]:
    """What all attempts of a job, or of a script's call, share: its number; and how many restarts
    came before.
    """
    series, _, number = attempt.rpartition(".")
    return series, int(number) if number.isdecimal() else 0


def record_training(config: RunConfig, world_size: int, step: int) -> None:
    """Records that this attempt starts to train, after `step` steps, and the run that it trains."""
    try:
        write_run(config)
    except OSError as error:  # a full disk must not end the work
        _logger.error("%s: this run is not recorded: %s", config.folder / RUN_FILE, error.strerror)
    training = Training(
        world_size=world_size,
        step=step,
        steps=config.schedule.steps,
        tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
    )
    record_start(config.folder, "train", training)


def record_start(folder: Path, stage: str, training: Training | None = None) -> None:
    saved, by = newest_checkpoint_step(folder), LockOwner.this_process()
    _append(folder, StageStart(stage=stage, checkpoint_step=saved, by=by, training=training))


def record_end(
    folder: Path,
    *,
    exit_code: int,
    step: int | None = None,
    error: str | None = None,
    stage: str = "train",
    retry: Decision | None = None,
) -> None:
    """Records how `stage` ended in this attempt. Without an `error`, the error recorded before
    stays.
    """
    before = next((one.end for one in read_attempts(folder) if one.name == this_attempt()), None)
    if error is None and before is not None and exit_code != FINISHED:
        error, step = before.error, before.step
    saved = newest_checkpoint_step(folder)
    _append(
        folder,
        StageEnd(
            stage=stage,
            checkpoint_step=saved,
            exit_code=exit_code,
            step=step,
            error=error,
            retry=retry,
        ),
    )


def _append(folder: Path, record: _StageRecord) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A single write to a file opened for appending: lines of several processes do not mix.
        with (folder / NAME).open("a+b", buffering=0) as file:
            cut_short = (
                file.seek(0, os.SEEK_END) > 0
                and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            )
            file.write(b"\n" * cut_short + record.model_dump_json().encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        if isinstance(record, StageStart) and exit_code_of(error) == USER_ERROR:
            raise  # nothing else could be written there either
        # A full disk must not end the work.
        _logger.error("%s: this attempt is not recorded: %s", folder / NAME, error.strerror)


def read_attempts(folder: Path) -> list[Attempt]:
    """The attempts at the run in `folder`, the one with the newest line last; none where they
    cannot be read.

    It omits lines that a kill cut short, and attempts that were refused because another job was
    using the folder.
    """
    attempts: dict[str, Attempt] = {}
    lines: list[bytes] = []
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.error("%s: cannot be read (%s); move it away", folder / NAME, error.strerror)
    for line in lines:
        try:
            record = _RECORD.validate_json(line)
        except ValidationError:
            continue
        attempt = attempts.pop(record.attempt, None) or Attempt(
            record.attempt, record.checkpoint_step
        )
        attempt.add(record)
        attempts[record.attempt] = attempt
    return [
        one for one in attempts.values() if one.end is None or one.end.exit_code != FOLDER_TAKEN
    ]


def decide(
    folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int
) -> Decision:
    """Decides whether the attempt that just ended in `stage` of the run in `folder` is retried, and
    records it.

    A series has at most `most` restarts, of which at most `without_progress` in a row bring no
    newer checkpoint. An attempt that saved and stopped counts like a failed one, so that a stage
    too long for a job's time limit ends.
    """
    _, restarts = series_and_number(this_attempt())
    idle = _idle_attempts(folder, stage, exit_code)
    again, why = (
        False,
        f"restart {restarts + 1}, {idle} of at most {without_progress} without progress",
    )
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
    """How many attempts of this series, up to the one that just ended, came after the one that
    saved last.

    Attempts that left no line count too, so that a disk that takes no records ends a run as well.
    """
    newest, (series, own) = newest_checkpoint_step(folder), series_and_number(this_attempt())
    attempts = {}
    for attempt in read_attempts(folder):
        of, number = series_and_number(attempt.name)
        if of == series and number <= own:
            attempts[number] = attempt
    ended = attempts.setdefault(own, Attempt(this_attempt(), newest))
    ended.add(StageEnd(stage=stage, checkpoint_step=newest, exit_code=exit_code))
    saved_last = max(
        (number for number, attempt in attempts.items() if attempt.checkpoint_step < newest),
        default=-1,
    )
    return (
        own
        - saved_last
        - sum(attempt.is_excused for number, attempt in attempts.items() if number > saved_last)
    )


@contextmanager
def stage_of(config: RunConfig | None, stage: str, *, alone: bool = False) -> Iterator[None]:
    """Runs the block as a serial stage of the run `config`; without `config` it is of no run.

    A run's first stage writes `run.yaml`, at the latest when it is done. Start and end are recorded
    if a script, which sets ATTEMPT, started the stage. `alone`: takes the stage's lock; raises
    FolderTakenError where another has it.
    """
    if config is None:
        yield
        return
    folder, recorded = config.folder, "ATTEMPT" in os.environ
    if recorded:
        record_start(folder, stage)
    try:
        with RunLock(folder, stage) if alone else nullcontext():
            yield
            begin_run(config)
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        code, said = (
            (INTERRUPTED, None) if interrupted else (exit_code_of(error), in_one_line(error))
        )
        if recorded:
            record_end(folder, stage=stage, exit_code=code, error=said)
        raise
    if recorded:
        record_end(folder, stage=stage, exit_code=FINISHED)


def begin_run(config: RunConfig) -> None:
    """Writes `run.yaml`, unless it is there: a stage that takes hours calls this once its checks
    have passed.
    """
    if not (config.folder / RUN_FILE).exists():
        write_run(config)
