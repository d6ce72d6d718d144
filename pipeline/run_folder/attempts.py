"""The attempts at a run, on record in its folder: who made each, how far it came, and why it ended.

Three kinds of lines are appended: a serial stage begins, training begins, a stage ends. What was killed has no end,
unless the script that started it adds one.
"""

from __future__ import annotations

import os
import re
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
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import FINISHED, FOLDER_TAKEN, RESUME_LATER, exit_code_of, in_one_line, worth_another_attempt
from pipeline.log import node
from pipeline.run_folder.lock import LockOwner, RunLock

NAME = "attempts.jsonl"
_logger = log.get_logger(__name__)
_CHECKPOINT = re.compile(r"step_(\d+)$")


class Began(BaseModel):
    """A serial stage begins, in the process `by`; of training, the lock says who is at it."""

    model_config = ConfigDict(frozen=True)

    attempt: str
    stage: str
    by: LockOwner


class Started(BaseModel):
    """An attempt begins to train. `step` is where it begins, and `checkpoint_step` that of the newest checkpoint."""

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


class Decision(NamedTuple):
    """Whether there is another attempt, and why, for a person."""

    again: bool
    why: str


class Ended(BaseModel):
    """A stage ended. `step` is the last that was finished, None where nobody knows; so is `retry`."""

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
    """What the lines of one attempt say together: of its last stage, and of its training."""

    name: str
    began: Began | None = None
    started: Started | None = None
    ended: Ended | None = None

    @property
    def series(self) -> str:
        """What the attempts of one job, or of one call of a script, have in common."""
        return self.name.rpartition(".")[0]

    @property
    def job(self) -> str | None:
        """Its Slurm job."""
        if self.ended is not None:
            return self.ended.job
        if self.started is not None:
            return self.started.job
        return None if self.began is None else self.began.by.job

    @property
    def stage(self) -> str:
        """The stage that it came to."""
        if self.ended is not None:
            return self.ended.stage
        return "train" if self.began is None else self.began.stage

    @property
    def at_risk(self) -> bool:
        """Whether it trained, or met a fault: a serial stage may take as many turns as it needs."""
        return self.started is not None or (self.ended is not None and self.ended.exit_code != FINISHED)


def this_attempt(environment: Mapping[str, str] = os.environ) -> str:
    """This attempt's name, `<series>.<number>`: the script's that started it, or Slurm's job and restart."""
    if name := environment.get("ATTEMPT"):
        return name
    if job := environment.get("SLURM_JOB_ID"):
        return f"{job}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    return f"{socket.gethostname()}-{os.getpid()}.0"


def record_stage(folder: Path, stage: str) -> None:
    """Notes in the run's folder that a serial stage begins in this process."""
    _append(folder, Began(attempt=this_attempt(), stage=stage, by=LockOwner.this_process()))


def record_start(config: RunConfig, world_size: int, step: int) -> None:
    """Notes in the run's folder that this attempt begins to train, after `step` steps."""
    _append(
        config.folder,
        Started(
            attempt=this_attempt(),
            job=os.environ.get("SLURM_JOB_ID"),
            node=node(),
            time=time.time(),
            world_size=world_size,
            step=step,
            steps=config.schedule.steps,
            tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
            checkpoint_step=newest_checkpoint_step(config.folder),
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
    """Notes how `stage` ended in this attempt. Where there is no `error`, the one that was noted before stays."""
    own = this_attempt()
    before = next((one.ended for one in read_attempts(folder) if one.name == own), None)
    if error is None and before is not None and exit_code != FINISHED:
        error, step = before.error, before.step
    ended = Ended(
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
    """The attempts at the run in `folder`, that of the newest line last.

    A line that a kill cut short is left out, and so are attempts that found another job at work: the run is that job's.
    """
    attempts: dict[str, Attempt] = {}
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        record = _parsed(line)
        if record is None:
            continue
        attempt = attempts.pop(record.attempt, None) or Attempt(name=record.attempt)
        attempts[record.attempt] = attempt
        attempt.ended = None
        if isinstance(record, Began):
            attempt.began = record
        elif isinstance(record, Started):
            attempt.began, attempt.started = None, record
        else:
            attempt.ended = record
    return [one for one in attempts.values() if one.ended is None or one.ended.exit_code != FOLDER_TAKEN]


def count_restarts(attempts: Iterable[Attempt], *beginning: str) -> int:
    """How often training began again: the attempts that came to train, and those `beginning` to, but for the first."""
    return max(0, len({one.name for one in attempts if one.started is not None} | {*beginning}) - 1)


def newest_checkpoint_step(folder: Path) -> int:
    """The step of the checkpoint from which the run in `folder` would go on; 0 where there is none.

    Those after the one that `latest` names are of an attempt that went back.
    """
    checkpoints = folder / "checkpoints"
    found = (_CHECKPOINT.search(path.parent.name) for path in checkpoints.glob("step_*/manifest.json"))
    steps = [int(match[1]) for match in found if match]
    try:
        named = _CHECKPOINT.search((checkpoints / "latest").read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        named = None
    return max((step for step in steps if named is None or step <= int(named[1])), default=0)


def _append(folder: Path, record: BaseModel) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: lines of several processes do not mix.
        with (folder / NAME).open("a+b", buffering=0) as file:
            cut_short = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            file.write(b"\n" * cut_short + record.model_dump_json().encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        # The record is for people: a full disk shall not end the work that it tells of.
        _logger.error("%s: this attempt goes unrecorded: %s", folder / NAME, error.strerror)


def _parsed(line: bytes) -> Began | Started | Ended | None:
    try:
        values: Any = orjson.loads(line)
        kind = Ended if "exit_code" in values else Began if "by" in values else Started
        return kind.model_validate(values)
    except (ValueError, TypeError, ValidationError):
        return None


# --- Whether an attempt that did not come to the end is made again: not without end, where none comes any further ---

_KEEPS_ITS_WORK = "tokenize"
"""The stage that goes on where it was stopped, and yet leaves no checkpoint that would tell."""


def decide(folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int) -> Decision:
    """Decides about the attempt that just ended in `stage` of the run in `folder`, and puts it on record.

    There are at most `most` restarts in a series, and at most `without_progress` of them in a row in which no newer
    checkpoint appeared. To save and stop is progress where it left one; so a stage that never fits into a job's time is
    given up too. Only tokenizing, where it was told to stop, has come further whatever the checkpoints say.
    """
    own = Attempt(name=this_attempt())
    series = [one for one in read_attempts(folder) if one.series == own.series]
    own = next((one for one in series if one.name == own.name), own)
    restarts = int(own.name.rpartition(".")[2])
    attempts = [one for one in series if one is not own and one.at_risk and not _stopped_with_its_work(one)]
    if (stage, exit_code) != (_KEEPS_ITS_WORK, RESUME_LATER):
        attempts.append(own)
    idle = idle_attempts(attempts, newest_checkpoint_step(folder))
    if not worth_another_attempt(exit_code):
        decision = Decision(False, "its cause is to be mended first")
    elif restarts >= most:
        decision = Decision(False, f"it was restarted {restarts} times, and MAX_RESTARTS is {most}")
    elif idle > without_progress:
        limit = f"MAX_RESTARTS_WITHOUT_PROGRESS is {without_progress}"
        decision = Decision(False, f"{idle} attempt(s) in a row brought no newer checkpoint, and {limit}")
    else:
        decision = Decision(True, f"restart {restarts + 1}, {idle} of at most {without_progress} without progress")
    record_end(folder, exit_code=exit_code, stage=stage, retry=decision)
    return decision


def _stopped_with_its_work(attempt: Attempt) -> bool:
    ended = attempt.ended
    return ended is not None and (ended.stage, ended.exit_code) == (_KEEPS_ITS_WORK, RESUME_LATER)


def idle_attempts(attempts: list[Attempt], newest: int) -> int:
    """How many of the last attempts, in a row, brought no newer checkpoint; `newest` is the newest one's step now."""
    idle, reached = 0, 0
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


# --- A serial stage of a run: alone at it where it must be, and on record in the run's folder -----------------------


@contextmanager
def stage_of(config: Path | None, stage: str, *, alone: bool = False) -> Iterator[None]:
    """The block is a stage of the run that `config` describes; without a `config` it is no run's.

    That it begins and how it ends is noted, unless it is started by hand (without ATTEMPT, which the scripts set): then
    it is no attempt at the run. `alone`: no other process may be at the same stage.

    Raises:
        ConfigError: the configuration does not tell where the run's folder is.
        FolderTakenError: another process is at it, and the stage takes one.
    """
    if config is None:
        yield
        return
    folder = load_config(config).folder
    recorded = _on_record(stage, folder) if "ATTEMPT" in os.environ else nullcontext()
    with recorded, RunLock(folder, stage) if alone else nullcontext():
        yield


@contextmanager
def _on_record(stage: str, folder: Path) -> Iterator[None]:
    record_stage(folder, stage)
    try:
        yield
    except Exception as error:
        code = exit_code_of(error)
        record_end(folder, stage=stage, exit_code=code, error=in_one_line(error))
        raise
    record_end(folder, stage=stage, exit_code=FINISHED)
