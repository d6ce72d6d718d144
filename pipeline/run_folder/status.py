"""How a run is, from its folder alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pipeline.errors import FINISHED, RESUME_LATER, RunFolderError
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import Attempt, Ended, count_restarts, newest_checkpoint_step, read_attempts
from pipeline.run_folder.lock import STALE_AFTER_S, LockOwner, job_state, lock_path, read_lock_owner
from pipeline.run_folder.metrics import METRICS, last_metrics

TRAINING = "training.json"
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18

_COMING = ("PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING")
_PATIENCE = "Slurm lets a requeued job wait about two minutes"

State = Literal["running", "waiting", "stopped", "done", "failed", "not started"]


@dataclass(frozen=True)
class RunStatus:
    """A run at this moment; None stands for what its folder does not say.

    `why` is for a person. `restarts` counts attempts that came to train, after the first. `loss` and
    `tokens_per_second` are of the last steps on record, over all GPUs. `seconds_left` and `expected_end` (of the epoch)
    hold if it goes on at that speed, from where it will: while it does not train, from its newest checkpoint.
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
            "which its first stage makes when its job starts (is it queued? squeue --me)"
        )
    attempts = read_attempts(folder)
    start = next((one.started for one in reversed(attempts) if one.started), None)
    saved = newest_checkpoint_step(folder)
    trained = (folder / TRAINING).exists() and (start is None or saved >= start.steps)
    state, why = _state(folder, attempts, trained=trained)
    lines = last_metrics(folder / METRICS, _RECENT_STEPS, _TAIL_BYTES)
    step = max([saved, *(line["step"] for line in lines[-1:])])
    speeds = [line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line]
    speed = median(speeds) * start.world_size if speeds and start else None
    left = None
    if start and speed and not trained and state in ("running", "waiting", "stopped"):
        goes_on_at = step if state == "running" and attempts[-1].started else saved
        left = round((start.steps - goes_on_at) * start.tokens_per_step / speed, 1)
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
        skipped_steps=next((line["skipped_steps"] for line in reversed(lines) if "skipped_steps" in line), 0),
        **_checkpoint(folder),
        seconds_left=left,
        expected_end=round(time.time() + left) if left is not None and state == "running" else None,
    )


def runs_in(folder: Path) -> list[Path]:
    """The runs that have begun below a study's folder; none where the folder is a run's own."""
    if (folder / ATTEMPTS).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{ATTEMPTS}"))


def _state(folder: Path, attempts: list[Attempt], *, trained: bool) -> tuple[State, str]:
    beyond = " (all steps are trained)" if trained else ""
    holder = read_lock_owner(lock_path(folder))
    if holder is not None and _lives(folder, holder):
        return "running", f"train: {holder}"
    if not attempts:
        return "not started", "no attempt is on record"
    last = attempts[-1]
    if holder := _at_work(attempts, last.stage):
        return "running", f"{last.stage}: {holder}{beyond}"
    queued = "" if last.job is None else job_state(last.job)
    if last.ended is None:
        if queued in _COMING:
            return "waiting", f"the last attempt ended without a word; job {last.job} is to start again; {_PATIENCE}"
        return "failed", "the last attempt ended without a word (killed?); the same command goes on"
    if last.ended.exit_code == FINISHED and queued == "RUNNING":
        return "running", f"job {last.job} goes on after {last.stage}{beyond}"
    state, why = _after(last.ended, trained=trained)
    if state == "waiting" and last.ended.exit_code != FINISHED:
        if queued == "PENDING":
            return state, f"{why}; {_PATIENCE}"
        if queued != "" and queued not in _COMING:
            return "stopped", f"{why}; job {last.job} is no longer queued: the same command goes on"
    return state, why


def _at_work(attempts: list[Attempt], stage: str) -> LockOwner | None:
    """Who is at that serial stage, if anybody; several jobs of an array may be."""
    here = LockOwner.this_process()
    began = (one.began for one in reversed(attempts) if one.began and one.ended is None)
    return next((one.by for one in began if one.stage == stage and not one.by.is_gone(here)), None)


def _after(ended: Ended, *, trained: bool) -> tuple[State, str]:
    """What follows from how the last attempt ended, as far as it knew."""
    if ended.exit_code == FINISHED:
        return (
            ("done", "all steps are done") if trained else ("waiting", f"{ended.stage} is done, the next stage is due")
        )
    if ended.exit_code == RESUME_LATER:
        if ended.retry is not None and not ended.retry.again:
            return "failed", f"{ended.stage}: saved, and given up ({ended.retry.why})"
        return "waiting", "saved, to go on later"
    why = f"{ended.stage}: {ended.error or f'exit code {ended.exit_code}'}"
    if ended.retry is None:
        return "failed", why
    return ("waiting" if ended.retry.again else "failed"), f"{why} ({ended.retry.why})"


def _lives(folder: Path, holder: LockOwner) -> bool:
    """Whether the holder of the lock is at work, as far as one can tell from here."""
    if holder.is_gone(LockOwner.this_process()):
        return False
    try:
        return time.time() - lock_path(folder).stat().st_mtime < STALE_AFTER_S
    except FileNotFoundError:
        return False


def _checkpoint(folder: Path) -> dict[str, Any]:
    step = newest_checkpoint_step(folder)
    if step == 0:
        return {"checkpoint": None, "checkpoint_age_s": None}
    newest = folder / "checkpoints" / f"step_{step:08d}"
    return {"checkpoint": str(newest), "checkpoint_age_s": round(time.time() - newest.stat().st_mtime, 1)}


# --- A run's status for a person: a few aligned lines ---------------------------------------------------------------


def as_text(status: RunStatus) -> str:
    """One fact a line; what is not known is left out."""
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
    said = {name: text for name, text in facts.items() if text is not None}
    width = max(map(len, said))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in said.items())


def as_lines(statuses: Sequence[RunStatus]) -> str:
    """One run a line: its folder's name, state, steps, and why."""
    rows = [
        (Path(one.folder).name, one.state, f"{one.step:,} of {one.steps:,}" if one.steps else "", one.why)
        for one in statuses
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
