"""The attempts at a run, on record in its folder: who made each, how far it came, and why it ended.

Three kinds of lines are appended: a serial stage begins, training begins, a stage ends. What was killed has no end,
unless the script that started it adds one.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.exit_codes import FINISHED, FOLDER_TAKEN
from pipeline.log import node
from pipeline.run_folder.holder import Holder

NAME = "attempts.jsonl"
_logger = log.get_logger(__name__)
_CHECKPOINT = re.compile(r"step_(\d+)$")


class Began(BaseModel):
    """A serial stage begins, in the process `by`; of training, the lock says who is at it."""

    model_config = ConfigDict(frozen=True)

    attempt: str
    stage: str
    by: Holder


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
    _append(folder, Began(attempt=this_attempt(), stage=stage, by=Holder.this_process()))


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
