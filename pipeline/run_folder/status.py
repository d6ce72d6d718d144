"""The state of a run, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Literal

from pipeline.config.sources import CHECKPOINTS
from pipeline.errors import FINISHED, INTERRUPTED, RESUME_LATER, RunFolderError
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import Attempt, read_attempts
from pipeline.run_folder.checkpoint_names import checkpoint_name, newest_checkpoint_step
from pipeline.run_folder.lock import LockOwner, age_s, living_owner, lock_path
from pipeline.run_folder.metrics import METRICS, only_numbers, read_metrics
from pipeline.run_folder.slurm_job import slurm_job

TRAINING = "training.json"
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18
_RESUMES = "it resumes with its job, or by the same command"
_SAME_COMMAND = "the same command resumes"

State = Literal["running", "waiting", "stopped", "done", "failed", "not started"]


@dataclass(frozen=True)
class RunStatus:
    """A run at this moment; None where its folder does not have the value."""

    folder: str
    state: State
    why: str
    """the reason for the state, for messages"""
    step: int
    steps: int | None
    tokens_seen: int | None
    loss: float | None
    tokens_per_second: float | None
    """of the last recorded steps, over all GPUs"""
    restarts: int
    """attempts that trained, after the first"""
    skipped_steps: int
    checkpoint: str | None
    checkpoint_age_s: float | None
    seconds_left: float | None
    """at that speed; for a run that does not train now, from its newest checkpoint"""


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` is trained to its last step."""
    return (folder / TRAINING).exists()


def read_status(folder: Path) -> RunStatus:
    """The state of the run in `folder`, whose job Slurm is asked about; raises RunFolderError if
    there is no such folder."""
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: no such run folder; expected what a configuration names as its `folder`, "
            "which its first stage creates when its job starts (is it queued? squeue --me)"
        )
    attempts = read_attempts(folder)
    trained = next((attempt.training for attempt in reversed(attempts) if attempt.training), None)
    state, why = _state(folder, attempts)
    if is_trained(folder) and state != "done":
        why += " (all steps are trained)"
    saved = newest_checkpoint_step(folder)
    checkpoint = folder / CHECKPOINTS / checkpoint_name(saved) if saved else None
    lines = [
        only_numbers(line) for line in read_metrics(folder / METRICS, _TAIL_BYTES)[-_RECENT_STEPS:]
    ]
    last = {name: value for line in lines for name, value in line.items()}
    step = max(saved, int(last.get("step", 0)))
    speeds = [
        line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line
    ]
    speed = median(speeds) * trained.world_size if speeds and trained else None
    left = None
    if trained and speed and not is_trained(folder) and state in ("running", "waiting", "stopped"):
        resumes_at = step if state == "running" and attempts[-1].training else saved
        left = round((trained.steps - resumes_at) * trained.tokens_per_step / speed, 1)
    return RunStatus(
        folder=str(folder),
        state=state,
        why=why,
        step=step,
        steps=trained.steps if trained else None,
        tokens_seen=step * trained.tokens_per_step if trained else None,
        loss=last.get("loss"),
        tokens_per_second=round(speed, 1) if speed else None,
        restarts=max(0, sum(attempt.training is not None for attempt in attempts) - 1),
        skipped_steps=int(last.get("skipped_steps", 0)),
        checkpoint=str(checkpoint) if checkpoint else None,
        checkpoint_age_s=round(age_s(checkpoint), 1) if checkpoint else None,
        seconds_left=left,
    )


def runs_in(folder: Path) -> list[Path]:
    """The started runs in a study's folder; none where the folder is a run's own."""
    if (folder / ATTEMPTS).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{ATTEMPTS}"))


def _state(folder: Path, attempts: list[Attempt]) -> tuple[State, str]:
    if owner := living_owner(lock_path(folder)):
        return "running", f"train: {owner}"
    if not attempts:
        return "not started", "no attempt is on record"
    last = attempts[-1]
    stage = last.end.stage if last.end else last.start and last.start.stage
    for attempt in reversed(attempts):  # of an array's tasks any may be at work
        began = attempt.start
        if began and not attempt.end and began.stage == stage != "train" and not _is_gone(began.by):
            return "running", f"{began.stage}: {began.by}"
    ended = last.end
    if ended is None:
        return _state_without_reason(stage or "train", last)
    if ended.exit_code == FINISHED:
        if is_trained(folder):
            return "done", "all steps are done"
        return _state_of_job(last, "waiting", f"{ended.stage} is done, the next stage follows", "")
    if ended.exit_code == INTERRUPTED:
        return "stopped", f"{ended.stage}: interrupted by the user; {_SAME_COMMAND}"
    saved = ended.exit_code == RESUME_LATER
    why = f"{ended.stage}: {'saved' if saved else ended.error or f'exit code {ended.exit_code}'}"
    if ended.retry is not None:
        why += f" ({ended.retry.why})"
    if saved if ended.retry is None else ended.retry.again:
        return _state_of_job(last, "waiting", why, f"; {_RESUMES}")
    return "failed", why


def _is_gone(by: LockOwner) -> bool:
    """Whether a process has ended, as is known on its own machine, or from Slurm if its job runs no
    longer.
    """
    if by.is_gone:
        return True
    job = slurm_job(by.job) if by.job else None
    return job is not None and job.kind != "running"


def _state_without_reason(stage: str, last: Attempt) -> tuple[State, str]:
    """Of an attempt that put no end on record: its processes were killed, or the job is about to
    end.
    """
    where = ""
    if last.start is not None and last.start.by.job:
        where = f" of job {last.start.by.job}"
    unknown = f"{stage}: the last attempt{where} left no reason (cancelled or killed?); {_RESUMES}"
    return _state_of_job(last, "failed", f"{stage}: no end is on record", "", unknown)


def _state_of_job(
    last: Attempt, otherwise: State, why: str, resumes: str, unknown: str | None = None
) -> tuple[State, str]:
    """The state of a run that no process works at, by the state of its last attempt's job.

    `why` says how that attempt ended. Where Slurm knows nothing of the job, the state is
    `otherwise`, for the reason `unknown`, or else `why` and how it `resumes`.
    """
    number = last.start.by.job if last.start is not None else None
    job = slurm_job(number) if number else None
    if job is None:
        return otherwise, unknown or f"{why}{resumes}"
    if job.name == "COMPLETED":  # it was to run some stages only
        return otherwise, f"{why}; job {number} is done; {_SAME_COMMAND}"
    if job.kind == "running":
        return "running", f"{why}; job {number} is {job.name.lower()}"
    if job.kind == "queued":
        return "waiting", f"{why}; job {number} is queued and resumes it"
    if job.kind == "cancelled":
        return "stopped", f"{why}; job {number} was cancelled; {_SAME_COMMAND}"
    return "failed", f"{why}; job {number} has ended as {job.name}; {_SAME_COMMAND}"


def as_text(status: RunStatus) -> str:
    """Aligned lines, one per known fact."""
    steps, saved, left = status.steps, status.checkpoint_age_s, status.seconds_left
    facts = {"run": status.folder, "state": f"{status.state}: {status.why}"}
    if steps:
        facts["step"] = f"{status.step:,} of {steps:,} ({status.step / steps:.1%})"
    if status.tokens_seen is not None:
        facts["tokens"] = f"{status.tokens_seen:,}"
    if status.loss is not None:
        facts["loss"] = f"{status.loss:.4f}"
    if status.tokens_per_second:
        facts["speed"] = f"{status.tokens_per_second:,.0f} tokens/s"
    facts["restarts"] = f"{status.restarts} so far"
    if status.skipped_steps:
        facts["skipped"] = f"{status.skipped_steps} step(s)"
    facts["checkpoint"] = (
        "none yet" if saved is None else f"{status.checkpoint}, {_duration(saved)} old"
    )
    if left is not None:
        facts["end"] = f"after {_duration(left)} of training"
    return "\n".join(f"{name:<10}  {text}" for name, text in facts.items())


def as_lines(statuses: Sequence[RunStatus]) -> str:
    """One line per run: its folder's name, state, steps, and reason."""
    rows = []
    for run in statuses:
        steps = f"{run.step:,} of {run.steps:,}" if run.steps else ""
        rows.append((Path(run.folder).name, run.state, steps, run.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
