"""The attempts at a run, recorded in its folder, and whether a failed one is retried.

Three kinds of lines are appended: a serial stage starts, training starts, a stage ends. A killed attempt has no end,
unless the script that started it appends one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline import log
from pipeline.config.run import RunConfig, write_run
from pipeline.config.sources import RUN_FILE
from pipeline.errors import (
    FINISHED,
    FOLDER_TAKEN,
    INTERRUPTED,
    RESUME_LATER,
    USER_ERROR,
    RunFolderError,
    UserError,
    exit_code_of,
    in_one_line,
    worth_another_attempt,
)
from pipeline.files import read_bytes
from pipeline.log import node
from pipeline.run_folder.checkpoint_names import named_checkpoint, step_in
from pipeline.run_folder.lock import LockOwner, RunLock

NAME = "attempts.jsonl"
_logger = log.get_logger(__name__)
_RESUMABLE = ("tokenize", "sample")
"""The stages that resume where they were stopped, but write no checkpoint."""


class StageStart(BaseModel):
    """A serial stage starts in the process `by`. Training's process is in the lock instead."""

    model_config = ConfigDict(frozen=True)

    attempt: str
    stage: str
    by: LockOwner


class TrainingStart(BaseModel):
    """An attempt starts to train at `step`; `checkpoint_step` is the newest checkpoint's.

    `changed` are the settings that differ from those of the attempt before: theirs, and now.
    """

    model_config = ConfigDict(frozen=True)

    attempt: str
    job: str | None
    node: str
    time: float
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


class StageEnd(BaseModel):
    """A stage ended after `step`. `step` and `retry` are None where unknown."""

    model_config = ConfigDict(frozen=True)

    attempt: str
    job: str | None = None
    stage: str
    time: float
    exit_code: int
    step: int | None
    checkpoint_step: int
    error: str | None
    retry: Decision | None = None


class Attempt(BaseModel):
    """All lines of one attempt: its last stage, and its training."""

    name: str
    began: StageStart | None = None
    started: TrainingStart | None = None
    ended: StageEnd | None = None

    @property
    def series(self) -> str:
        """The part of the name that all attempts of a job, or of a call of a script, share."""
        return self.name.rpartition(".")[0]

    @property
    def number(self) -> int:
        """Its number in the series: how many restarts came before it."""
        digits = self.name.rpartition(".")[2]
        return int(digits) if digits.isdecimal() else 0

    @property
    def job(self) -> str | None:
        """Its Slurm job, if any."""
        if self.ended is not None:
            return self.ended.job
        if self.started is not None:
            return self.started.job
        return None if self.began is None else self.began.by.job

    @property
    def stage(self) -> str:
        """The last stage that it reached."""
        if self.ended is not None:
            return self.ended.stage
        return "train" if self.began is None else self.began.stage

    @property
    def counts(self) -> bool:
        """Whether it counts against the limits: it trained or failed. A serial stage may take many requeues."""
        return self.started is not None or (self.ended is not None and self.ended.exit_code != FINISHED)


def this_attempt(environment: Mapping[str, str] = os.environ) -> str:
    """This attempt's name, `<series>.<number>`, from the script that started it or Slurm's job and restart."""
    if name := environment.get("ATTEMPT"):
        return name
    if job := environment.get("SLURM_JOB_ID"):
        return f"{job}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    return f"{socket.gethostname()}-{os.getpid()}.0"


def record_stage(folder: Path, stage: str) -> None:
    """Records that a serial stage starts in this process."""
    _append(folder, StageStart(attempt=this_attempt(), stage=stage, by=LockOwner.this_process()))


def record_start(config: RunConfig, world_size: int, step: int) -> None:
    """Records that this attempt starts to train, after `step` steps, and the run that it trains."""
    changed = {}
    try:
        if changed := write_run(config):
            _logger.info("changed: %s", ", ".join(f"{key} {old} → {new}" for key, (old, new) in changed.items()))
    except OSError as error:  # a full disk must not end the work
        _logger.error("%s: this run is not recorded: %s", config.folder / RUN_FILE, error.strerror)
    _append(
        config.folder,
        TrainingStart(
            attempt=this_attempt(),
            job=os.environ.get("SLURM_JOB_ID"),
            node=node(),
            time=time.time(),
            world_size=world_size,
            step=step,
            steps=config.schedule.steps,
            tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
            checkpoint_step=newest_checkpoint_step(config.folder),
            changed=changed,
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
    """Records how `stage` ended in this attempt. Without an `error`, the error recorded before stays."""
    own = this_attempt()
    before = next((attempt.ended for attempt in _known_attempts(folder) if attempt.name == own), None)
    if error is None and before is not None and exit_code != FINISHED:
        error, step = before.error, before.step
    ended = StageEnd(
        attempt=own,
        job=os.environ.get("SLURM_JOB_ID"),
        stage=stage,
        time=time.time(),
        exit_code=exit_code,
        step=step,
        checkpoint_step=newest_checkpoint_step(folder),
        error=error,
        retry=retry,
    )
    _append(folder, ended)


def read_attempts(folder: Path) -> list[Attempt]:
    """The attempts at the run in `folder`, the one with the newest line last.

    It omits lines that a kill cut short, and attempts that were refused because another job was using the folder.

    Raises:
        RunFolderError: the record cannot be read.
    """
    attempts: dict[str, Attempt] = {}
    try:
        lines = read_bytes(folder / NAME, RunFolderError, "move it away").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        record = _parse(line)
        if record is None:
            continue
        attempt = attempts.pop(record.attempt, None) or Attempt(name=record.attempt)
        attempts[record.attempt] = attempt
        attempt.ended = None
        if isinstance(record, StageStart):
            attempt.began = record
        elif isinstance(record, TrainingStart):
            attempt.began, attempt.started = None, record
        else:
            attempt.ended = record
    return [
        attempt for attempt in attempts.values() if attempt.ended is None or attempt.ended.exit_code != FOLDER_TAKEN
    ]


def _known_attempts(folder: Path) -> list[Attempt]:
    """The same, none where the record cannot be read."""
    try:
        return read_attempts(folder)
    except RunFolderError as error:
        _logger.error("%s", error)
        return []


def count_restarts(attempts: Iterable[Attempt], *starting: str) -> int:
    """How often training restarted: the attempts that trained, and those `starting` now, minus the first."""
    return max(0, len({attempt.name for attempt in attempts if attempt.started is not None} | {*starting}) - 1)


def newest_checkpoint_step(folder: Path) -> int:
    """The step of the checkpoint from which the run in `folder` would resume; 0 if there is none.

    Checkpoints after the one in `latest` were voided by a rollback.
    """
    checkpoints = folder / "checkpoints"
    found = (step_in(path.parent.name) for path in checkpoints.glob("step_*/manifest.json"))
    try:
        named = named_checkpoint(checkpoints)
    except UserError:  # resuming reports it
        named = None
    newest = None if named is None else step_in(named.name)
    return max((step for step in found if step is not None and (newest is None or step <= newest)), default=0)


def _append(folder: Path, record: BaseModel) -> None:
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


def _parse(line: bytes) -> StageStart | TrainingStart | StageEnd | None:
    try:
        values: Any = orjson.loads(line)
        kind = StageEnd if "exit_code" in values else StageStart if "by" in values else TrainingStart
        return kind.model_validate(values)
    except (ValueError, TypeError, ValidationError):
        return None


def decide(folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int) -> Decision:
    """Decides whether the attempt that just ended in `stage` of the run in `folder` is retried, and records it.

    A series has at most `most` restarts, of which at most `without_progress` in a row bring no newer checkpoint. An
    attempt that saved and stopped counts like a failed one, so that a stage too long for a job's time limit ends.
    Only tokenizing and sampling that were stopped by a signal always count as progress. The attempts since the last
    one on record brought none: their number is in this attempt's name, so a disk that takes no record ends a run too.
    """
    own = Attempt(name=this_attempt())
    series = [attempt for attempt in _known_attempts(folder) if attempt.series == own.series]
    own = next((attempt for attempt in series if attempt.name == own.name), own)
    others = [attempt for attempt in series if attempt is not own]
    restarts = own.number
    attempts = [
        attempt
        for attempt in others
        if attempt.counts and not (attempt.ended and _will_resume(attempt.ended.stage, attempt.ended.exit_code))
    ]
    if not _will_resume(stage, exit_code):
        attempts.append(own)
    idle = idle_attempts(attempts, newest_checkpoint_step(folder))
    if idle or _will_resume(stage, exit_code):
        idle += max(0, restarts - 1 - max((attempt.number for attempt in others), default=-1))
    if not worth_another_attempt(exit_code):
        decision = Decision(False, "its cause must be fixed first")
    elif restarts >= most:
        decision = Decision(False, f"it was restarted {restarts} times, and MAX_RESTARTS is {most}")
    elif idle > without_progress:
        limit = f"MAX_RESTARTS_WITHOUT_PROGRESS is {without_progress}"
        decision = Decision(False, f"{idle} attempt(s) in a row brought no newer checkpoint, and {limit}")
    else:
        decision = Decision(True, f"restart {restarts + 1}, {idle} of at most {without_progress} without progress")
    record_end(folder, exit_code=exit_code, stage=stage, retry=decision)
    return decision


def _will_resume(stage: str, exit_code: int) -> bool:
    return stage in _RESUMABLE and exit_code == RESUME_LATER


def idle_attempts(attempts: list[Attempt], newest: int) -> int:
    """How many attempts in a row, up to the last, brought no newer checkpoint; `newest` is the newest's step."""
    # A first attempt that did not train brought none of the checkpoints that an earlier job left.
    idle, reached = 0, newest if attempts and attempts[0].started is None else 0
    for attempt, following in zip_longest(attempts, attempts[1:]):
        began = reached if attempt.started is None else attempt.started.checkpoint_step
        if following is None:
            reached = newest
        elif following.started is not None:
            reached = following.started.checkpoint_step
        else:
            reached = began if attempt.ended is None else attempt.ended.checkpoint_step
        idle = 0 if reached > began else idle + 1
    return idle


@contextmanager
def stage_of(config: RunConfig | None, stage: str, *, alone: bool = False) -> Iterator[None]:
    """Runs the block as a serial stage of the run `config`; without `config` it is of no run.

    A run's first stage writes `run.yaml`, at the latest when it is done. Start and end are recorded if a script, which
    sets ATTEMPT, started the stage. `alone`: takes the lock of the stage.

    Raises:
        FolderTakenError: another process owns the lock.
    """
    if config is None:
        yield
        return
    folder = config.folder
    recorded = _recorded(stage, folder) if "ATTEMPT" in os.environ else nullcontext()
    alone_in_it = RunLock(folder, stage) if alone else nullcontext()
    with recorded, alone_in_it:
        yield
        begin_run(config)


def begin_run(config: RunConfig) -> None:
    """Writes `run.yaml`, unless it is there: a stage that takes hours calls this once its checks have passed."""
    if not (config.folder / RUN_FILE).exists():
        write_run(config)


@contextmanager
def _recorded(stage: str, folder: Path) -> Iterator[None]:
    record_stage(folder, stage)
    try:
        yield
    except KeyboardInterrupt:
        record_end(folder, stage=stage, exit_code=INTERRUPTED)
        raise
    except Exception as error:
        code = exit_code_of(error)
        record_end(folder, stage=stage, exit_code=code, error=in_one_line(error))
        raise
    record_end(folder, stage=stage, exit_code=FINISHED)
