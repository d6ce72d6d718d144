"""The state of a run, from its folder alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pipeline.errors import FINISHED, INTERRUPTED, RESUME_LATER, RunFolderError
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import Attempt, StageEnd, count_restarts, newest_checkpoint_step, read_attempts
from pipeline.run_folder.lock import LockOwner, age_s, job_state, living_owner, lock_path
from pipeline.run_folder.metrics import METRICS, last_metrics, only_numbers

TRAINING = "training.json"
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18

_QUEUED_OR_RUNNING = ("PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING")
_REQUEUE_DELAY = "Slurm holds a requeued job for about two minutes"

State = Literal["running", "waiting", "stopped", "done", "failed", "not started"]


@dataclass(frozen=True)
class RunStatus:
    """A run at this moment; None where its folder does not have the value.

    Attributes:
        why: the reason for the state, for messages.
        restarts: attempts that trained, after the first.
        tokens_per_second: of the last recorded steps, over all GPUs.
        seconds_left: at that speed; for a run that does not train now, from its newest checkpoint.
        expected_end: seconds of the epoch.
    """

    folder: str
    state: State
    why: str
    step: int
    steps: int | None
    tokens_seen: int | None
    loss: float | None
    tokens_per_second: float | None
    restarts: int
    skipped_steps: int
    checkpoint: str | None
    checkpoint_age_s: float | None
    seconds_left: float | None
    expected_end: float | None


def read_status(folder: Path) -> RunStatus:
    """The state of the run in `folder`.

    Raises:
        RunFolderError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: no such run folder; expected what a configuration names as its `folder`, "
            "which its first stage creates when its job starts (is it queued? squeue --me)"
        )
    attempts = read_attempts(folder)
    start = next((attempt.started for attempt in reversed(attempts) if attempt.started), None)
    saved = newest_checkpoint_step(folder)
    trained = (folder / TRAINING).exists()
    state, why = _state(folder, attempts, trained=trained)
    lines = [only_numbers(line) for line in last_metrics(folder / METRICS, _RECENT_STEPS, _TAIL_BYTES)]
    step = max([saved, *(int(line["step"]) for line in lines[-1:])])
    speeds = [line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line]
    speed = median(speeds) * start.world_size if speeds and start else None
    left = None
    if start and speed and not trained and state in ("running", "waiting", "stopped"):
        resumes_at = step if state == "running" and attempts[-1].started else saved
        left = round((start.steps - resumes_at) * start.tokens_per_step / speed, 1)
    return RunStatus(
        folder=str(folder),
        state=state,
        why=why,
        step=step,
        steps=start.steps if start else None,
        tokens_seen=step * start.tokens_per_step if start else None,
        loss=next((line["loss"] for line in reversed(lines) if "loss" in line), None),
        tokens_per_second=round(speed, 1) if speed else None,
        restarts=count_restarts(attempts),
        skipped_steps=next((int(line["skipped_steps"]) for line in reversed(lines) if "skipped_steps" in line), 0),
        **_checkpoint(folder),
        seconds_left=left,
        expected_end=round(time.time() + left) if left is not None and state == "running" else None,
    )


def runs_in(folder: Path) -> list[Path]:
    """The started runs in a study's folder; none where the folder is a run's own."""
    if (folder / ATTEMPTS).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{ATTEMPTS}"))


def _state(folder: Path, attempts: list[Attempt], *, trained: bool) -> tuple[State, str]:
    note = " (all steps are trained)" if trained else ""
    if owner := living_owner(lock_path(folder)):
        return "running", f"train: {owner}"
    if not attempts:
        return "not started", "no attempt is on record"
    last = attempts[-1]
    if owner := _stage_owner(attempts, last.stage):
        return "running", f"{last.stage}: {owner}{note}"
    queued = "" if last.job is None else job_state(last.job)
    if last.ended is None:
        if queued in _QUEUED_OR_RUNNING:
            return "waiting", f"the last attempt left no reason; job {last.job} will restart; {_REQUEUE_DELAY}"
        return "failed", "the last attempt left no reason (killed?); the same command resumes"
    if last.ended.exit_code == FINISHED and queued == "RUNNING":
        return "running", f"job {last.job} continues after {last.stage}{note}"
    state, why = _state_after(last.ended, trained=trained)
    if state == "waiting" and last.ended.exit_code != FINISHED:
        if queued == "PENDING":
            return state, f"{why}; {_REQUEUE_DELAY}"
        if queued != "" and queued not in _QUEUED_OR_RUNNING:
            return "stopped", f"{why}; job {last.job} is no longer queued: the same command resumes"
    return state, why


def _stage_owner(attempts: list[Attempt], stage: str) -> LockOwner | None:
    """A process at that serial stage, if any; several jobs of an array may be."""
    here = LockOwner.this_process()
    starts = (attempt.began for attempt in reversed(attempts) if attempt.began and attempt.ended is None)
    return next((start.by for start in starts if start.stage == stage and not start.by.is_gone(here)), None)


def _state_after(ended: StageEnd, *, trained: bool) -> tuple[State, str]:
    """The state that follows from the end of the last attempt."""
    note = " (all steps are trained)" if trained else ""
    if ended.exit_code == FINISHED:
        if trained:
            return "done", "all steps are done"
        return "waiting", f"{ended.stage} is done, the next stage follows"
    if ended.exit_code == RESUME_LATER:
        if ended.retry is not None and not ended.retry.again:
            return "failed", f"{ended.stage}: saved, and given up ({ended.retry.why})"
        return "waiting", "saved, resumes later"
    if ended.exit_code == INTERRUPTED:
        return "stopped", f"{ended.stage}: interrupted by the user{note}; the same command resumes"
    why = f"{ended.stage}: {ended.error or f'exit code {ended.exit_code}'}"
    if ended.retry is None:
        return "failed", why
    return ("waiting" if ended.retry.again else "failed"), f"{why} ({ended.retry.why})"


def _checkpoint(folder: Path) -> dict[str, Any]:
    step = newest_checkpoint_step(folder)
    if step == 0:
        return {"checkpoint": None, "checkpoint_age_s": None}
    newest = folder / "checkpoints" / f"step_{step:08d}"
    return {"checkpoint": str(newest), "checkpoint_age_s": round(age_s(newest), 1)}


def as_text(status: RunStatus) -> str:
    """Aligned lines, one per known fact."""
    facts = {
        "run": status.folder,
        "state": f"{status.state}: {status.why}",
        "step": f"{status.step:,} of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else None,
        "tokens": f"{status.tokens_seen:,}" if status.tokens_seen is not None else None,
        "loss": f"{status.loss:.4f}" if status.loss is not None else None,
        "speed": f"{status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else None,
        "restarts": f"{status.restarts} so far",
        "skipped": f"{status.skipped_steps} step(s)" if status.skipped_steps else None,
        "checkpoint": _checkpoint_line(status),
        "end": _end(status),
    }
    known = {name: text for name, text in facts.items() if text is not None}
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in known.items())


def as_lines(statuses: Sequence[RunStatus]) -> str:
    """One line per run: its folder's name, state, steps, and reason."""
    rows = [
        (Path(run.folder).name, run.state, f"{run.step:,} of {run.steps:,}" if run.steps else "", run.why)
        for run in statuses
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _checkpoint_line(status: RunStatus) -> str | None:
    if status.checkpoint is None or status.checkpoint_age_s is None:
        return "none yet"
    return f"{status.checkpoint}, {_duration(status.checkpoint_age_s)} old"


def _end(status: RunStatus) -> str | None:
    if status.seconds_left is None:
        return None
    if status.expected_end is None:
        return f"after {_duration(status.seconds_left)} of training from the newest checkpoint"
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.expected_end))
    return f"in {_duration(status.seconds_left)}, on {moment}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
