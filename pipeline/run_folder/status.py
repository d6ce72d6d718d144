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
from pipeline.run_folder.lock import age_s, living_owner, lock_path
from pipeline.run_folder.metrics import METRICS, only_numbers, read_metrics

TRAINING = "training.json"
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18
_RESUMES = "it resumes with its job, or by the same command"

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
    """The state of the run in `folder`; raises RunFolderError if there is no such folder."""
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
    lines = [only_numbers(line) for line in read_metrics(folder / METRICS, _TAIL_BYTES)[-_RECENT_STEPS:]]
    last = {name: value for line in lines for name, value in line.items()}
    step = max(saved, int(last.get("step", 0)))
    speeds = [line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line]
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
        if began and not attempt.end and began.stage == stage != "train" and not began.by.is_gone:
            return "running", f"{began.stage}: {began.by}"
    ended = last.end
    if ended is None:
        return "failed", f"the last attempt left no reason (killed?); {_RESUMES}"
    if ended.exit_code == FINISHED:
        if is_trained(folder):
            return "done", "all steps are done"
        return "waiting", f"{ended.stage} is done, the next stage follows"
    if ended.exit_code == INTERRUPTED:
        return "stopped", f"{ended.stage}: interrupted by the user; the same command resumes"
    saved = ended.exit_code == RESUME_LATER
    why = f"{ended.stage}: {'saved' if saved else ended.error or f'exit code {ended.exit_code}'}"
    if ended.retry is not None:
        why += f" ({ended.retry.why})"
    if saved if ended.retry is None else ended.retry.again:
        return "waiting", f"{why}; {_RESUMES}"
    return "failed", why


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
    facts["checkpoint"] = "none yet" if saved is None else f"{status.checkpoint}, {_duration(saved)} old"
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
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
