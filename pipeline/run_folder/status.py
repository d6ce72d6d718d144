"""The state of a run, from its folder alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Literal

from pipeline.config.sources import CHECKPOINTS
from pipeline.errors import FINISHED, INTERRUPTED, RESUME_LATER, RunFolderError
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import Attempt, count_restarts, read_attempts
from pipeline.run_folder.checkpoint_names import checkpoint_name, newest_checkpoint_step
from pipeline.run_folder.lock import age_s, living_owner, lock_path
from pipeline.run_folder.metrics import METRICS, only_numbers, read_metrics

TRAINING = "training.json"
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18
_SLURM_TIMEOUT_S = 20.0
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


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` is trained to its end: its last step, or before where it stopped early."""
    return (folder / TRAINING).exists()


def read_status(folder: Path) -> RunStatus:
    """The state of the run in `folder`; raises RunFolderError if there is no such folder."""
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: no such run folder; expected what a configuration names as its `folder`, "
            "which its first stage creates when its job starts (is it queued? squeue --me)"
        )
    attempts = read_attempts(folder)
    start = next((attempt.started for attempt in reversed(attempts) if attempt.started), None)
    state, why = _state(folder, attempts)
    if is_trained(folder) and state != "done":
        why += " (all steps are trained)"
    saved = newest_checkpoint_step(folder)
    checkpoint = folder / CHECKPOINTS / checkpoint_name(saved) if saved else None
    lines = [only_numbers(line) for line in read_metrics(folder / METRICS, _TAIL_BYTES)[-_RECENT_STEPS:]]
    last = {name: value for line in lines for name, value in line.items()}
    step = max(saved, int(last.get("step", 0)))
    speeds = [line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line]
    speed = median(speeds) * start.world_size if speeds and start else None
    left = None
    if start and speed and not is_trained(folder) and state in ("running", "waiting", "stopped"):
        resumes_at = step if state == "running" and attempts[-1].started else saved
        left = round((start.steps - resumes_at) * start.tokens_per_step / speed, 1)
    return RunStatus(
        folder=str(folder),
        state=state,
        why=why,
        step=step,
        steps=start.steps if start else None,
        tokens_seen=step * start.tokens_per_step if start else None,
        loss=last.get("loss"),
        tokens_per_second=round(speed, 1) if speed else None,
        restarts=count_restarts(attempts),
        skipped_steps=int(last.get("skipped_steps", 0)),
        checkpoint=str(checkpoint) if checkpoint else None,
        checkpoint_age_s=round(age_s(checkpoint), 1) if checkpoint else None,
        seconds_left=left,
        expected_end=round(time.time() + left) if left is not None and state == "running" else None,
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
    working = [attempt.began for attempt in attempts if attempt.began and not attempt.ended]  # tasks of an array
    for began in reversed(working):
        if began.stage == last.stage and not began.by.is_gone:
            return "running", f"{began.stage}: {began.by}"
    job = _job_state(last.series) if last.series.isdecimal() else ""
    queued = job in _QUEUED_OR_RUNNING
    ended = last.ended
    if ended is None:
        if queued:
            return "waiting", f"the last attempt left no reason; job {last.series} will restart; {_REQUEUE_DELAY}"
        return "failed", "the last attempt left no reason (killed?); the same command resumes"
    if ended.exit_code == FINISHED:
        if job == "RUNNING":
            return "running", f"job {last.series} continues after {ended.stage}"
        if is_trained(folder):
            return "done", "all steps are done"
        return "waiting", f"{ended.stage} is done, the next stage follows"
    if ended.exit_code == INTERRUPTED:
        return "stopped", f"{ended.stage}: interrupted by the user; the same command resumes"
    saved = ended.exit_code == RESUME_LATER
    why = f"{ended.stage}: {'saved' if saved else ended.error or f'exit code {ended.exit_code}'}"
    if ended.retry is not None:
        why += f" ({ended.retry.why})"
    if not (saved if ended.retry is None else ended.retry.again):
        return "failed", why
    if job == "PENDING":
        return "waiting", f"{why}; {_REQUEUE_DELAY}"
    if job is None or (job and not queued):
        return "stopped", f"{why}; job {last.series} is no longer queued: the same command resumes"
    return "waiting", f"{why}; resumes later"


def _job_state(job: str) -> str | None:
    """Slurm's name for a job's state, None for a job that it no longer knows, "" where it cannot be asked."""
    command = ["squeue", "--noheader", "--jobs", job, "--format=%T"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if asked.returncode and "Invalid job id" not in asked.stderr:
        return ""
    return asked.stdout.strip() or None


def as_text(status: RunStatus) -> str:
    """Aligned lines, one per known fact."""
    steps, saved, left = status.steps, status.checkpoint_age_s, status.seconds_left
    facts = {
        "run": status.folder,
        "state": f"{status.state}: {status.why}",
        "step": f"{status.step:,} of {steps:,} ({status.step / steps:.1%})" if steps else None,
        "tokens": f"{status.tokens_seen:,}" if status.tokens_seen is not None else None,
        "loss": f"{status.loss:.4f}" if status.loss is not None else None,
        "speed": f"{status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else None,
        "restarts": f"{status.restarts} so far",
        "skipped": f"{status.skipped_steps} step(s)" if status.skipped_steps else None,
        "checkpoint": "none yet" if saved is None else f"{status.checkpoint}, {_duration(saved)} old",
        "end": None if left is None else f"after {_duration(left)} of training from the newest checkpoint",
    }
    if left is not None and status.expected_end is not None:
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.expected_end))
        facts["end"] = f"in {_duration(left)}, on {moment}"
    return "\n".join(f"{name:<10}  {text}" for name, text in facts.items() if text is not None)


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


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
