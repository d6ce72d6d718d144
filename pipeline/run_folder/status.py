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
from pipeline.run_folder.attempts import Attempt, StageEnd, Training, read_attempts
from pipeline.run_folder.checkpoint_names import checkpoint_name, newest_checkpoint_step
from pipeline.run_folder.lock import LockOwner, age_s, living_owner, lock_path
from pipeline.run_folder.metrics import (
    METRICS,
    only_numbers,
    read_metrics,
    readable,
    recent_validations,
)
from pipeline.run_folder.slurm_job import SlurmJob, slurm_job

TRAINING_FILE = "training.json"
SUMMARY = "summary.json"
"""The scores of base and export, which scale-cpt evaluate writes."""
# Only the end of metrics.jsonl, which may have a million lines, is read.
_RECENT_STEPS = 50
_TAIL_BYTES = 2**18
_TREND = 3
"""How many validations a trend has, beside the one before the first step."""
_RESUMES = "it resumes with its job, or by the same command"
_LAST_STAGE = "evaluate"
_SAME_COMMAND = "the same command resumes"

State = Literal["running", "waiting", "stopped", "done", "failed", "not started"]


@dataclass(frozen=True)
class Trend:
    """The held-out perplexity of a corpus: before the first step, and at the last validations."""

    corpus: str
    steps: tuple[int, ...]
    perplexity: tuple[float, ...]


@dataclass(frozen=True)
class RunStatus:
    """A run at this moment; None where its folder does not have the value.

    Attributes:
        why: the reason for the state, for messages.
        stage: the number and the name of the stage of its next step, where it trains in stages.
        heldout: the trend of each corpus, without a gate; empty before the first validation.
        tokens_per_second: the speed of the last recorded steps, over all GPUs.
        restarts: how many attempts trained, after the first.
        seconds_left: at that speed; for a run that does not train now, from its newest checkpoint.
    """

    folder: str
    state: State
    why: str
    step: int
    steps: int | None
    stage: str | None
    tokens_seen: int | None
    loss: float | None
    heldout: tuple[Trend, ...]
    tokens_per_second: float | None
    restarts: int
    skipped_steps: int
    checkpoint: str | None
    checkpoint_age_s: float | None
    seconds_left: float | None


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` is trained to its last step."""
    return (folder / TRAINING_FILE).exists()


def unfinished_progress(folder: Path) -> str | None:
    """How far the run in `folder` is saved, as `step 17 of 30`, while it is not trained to its end.

    None for a finished run, and for one that has no record of training. Reads files only: unlike
    `read_status`, it asks neither Slurm nor other processes.
    """
    steps: int | None = None
    for attempt in read_attempts(folder):
        if attempt.training is not None:
            steps = attempt.training.steps
    if steps is None or is_trained(folder):
        return None
    return f"step {newest_checkpoint_step(folder):,} of {steps:,}"


def read_status(folder: Path) -> RunStatus:
    """The state of the run in `folder`; Slurm is asked about its job.

    Raises:
        RunFolderError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: no such run folder; expected what a configuration names as its `folder`, "
            "which its first stage creates when its job starts (is it queued? squeue --me)"
        )
    attempts = read_attempts(folder)
    state, why = _state(folder, attempts)
    if is_trained(folder) and state != "done":
        why += " (all steps are trained)"
    training: Training | None = None
    trained_attempts = 0
    for attempt in attempts:
        if attempt.training is not None:
            training = attempt.training
            trained_attempts += 1

    # The newest figures, each of the last line that has it, and the speeds of the last steps.
    last: dict[str, float] = {}
    speeds: list[float] = []
    for line in read_metrics(folder / METRICS, _TAIL_BYTES)[-_RECENT_STEPS:]:
        figures = only_numbers(line)
        last.update(figures)
        if "tokens_per_second_per_gpu" in figures:
            speeds.append(figures["tokens_per_second_per_gpu"])

    saved = newest_checkpoint_step(folder)
    step = max(saved, int(last.get("step", 0)))
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    if saved > 0:
        path = folder / CHECKPOINTS / checkpoint_name(saved)
        checkpoint = str(path)
        checkpoint_age_s = round(age_s(path), 1)

    steps: int | None = None
    stage: str | None = None
    tokens_seen: int | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    if training is not None:
        steps = training.steps
        stage = training.stage_at(min(step + 1, training.steps))
        tokens_seen = training.tokens_after(step)
        # A median: steps with a validation or a slow read beside them do not change it.
        speed = median(speeds) * training.world_size if speeds else 0.0
        if speed > 0:
            tokens_per_second = round(speed, 1)
            trains_now = state == "running" and attempts[-1].training is not None
            # Steps after the newest checkpoint are computed again at a resume.
            resumes_at = step if trains_now else saved
            if not is_trained(folder) and state in ("running", "waiting", "stopped"):
                of_run = training.tokens_after(training.steps)
                tokens_left = of_run - training.tokens_after(resumes_at)
                seconds_left = round(tokens_left / speed, 1)
    if state == "done" and steps is not None and step < steps:
        why = "stopped early: the new text gained no more (validation.stop_after)"
    return RunStatus(
        folder=str(folder),
        state=state,
        why=why,
        step=step,
        steps=steps,
        stage=stage,
        tokens_seen=tokens_seen,
        loss=last.get("loss"),
        heldout=_trends(folder),
        tokens_per_second=tokens_per_second,
        restarts=max(0, trained_attempts - 1),
        skipped_steps=int(last.get("skipped_steps", 0)),
        checkpoint=checkpoint,
        checkpoint_age_s=checkpoint_age_s,
        seconds_left=seconds_left,
    )


def _trends(folder: Path) -> tuple[Trend, ...]:
    """The trend of every corpus that the last validation has."""
    records = recent_validations(folder / METRICS, _TREND)
    trends: list[Trend] = []
    for corpus in records[-1].figures if records else ():
        scored = [record for record in records if "perplexity" in record.figures.get(corpus, {})]
        trends.append(
            Trend(
                corpus,
                tuple(record.step for record in scored),
                tuple(record.figures[corpus]["perplexity"] for record in scored),
            )
        )
    return tuple(trends)


def runs_in(folder: Path) -> list[Path]:
    """The started runs in a study's folder; none where the folder is a run's own."""
    if (folder / ATTEMPTS).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{ATTEMPTS}"))


def _state(folder: Path, attempts: list[Attempt]) -> tuple[State, str]:
    """The state of a run and the reason for it."""
    # Training touches its lock every few seconds: that is surer than any record.
    owner = living_owner(lock_path(folder))
    if owner is not None:
        return "running", f"train: {owner}"
    if not attempts:
        return "not started", "no attempt is on record"
    last = attempts[-1]
    stage = _last_stage(last)
    # Of an array's tasks any may be at work.
    for attempt in reversed(attempts):
        start = attempt.start
        if start is None or attempt.end is not None or start.stage == "train":
            continue
        # Serial stages hold no lock that is touched: their process, or their job, is asked for
        # instead.
        if start.stage == stage and not _is_gone(start.by):
            return "running", f"{start.stage}: {start.by}"
    if last.end is None:
        return _state_without_reason(stage or "train", last)
    return _state_after(folder, last, last.end)


def _job_of(attempt: Attempt) -> SlurmJob | None:
    """The state of the Slurm job that an attempt ran in; None where Slurm knows of none."""
    if attempt.start is None or not attempt.start.by.job:
        return None
    return slurm_job(attempt.start.by.job)


def _last_stage(attempt: Attempt) -> str | None:
    """The stage that an attempt ended or was at."""
    if attempt.end is not None:
        return attempt.end.stage
    if attempt.start is not None:
        return attempt.start.stage
    return None


def _state_after(folder: Path, last: Attempt, end: StageEnd) -> tuple[State, str]:
    """The state of a run whose last attempt put its `end` on record."""
    job = _job_of(last)
    if end.exit_code == FINISHED:
        # A job that was queued again, or runs, has stages to come: the gate, the conversion.
        has_ended_well = job is None or job.name == "COMPLETED" or end.stage == _LAST_STAGE
        if is_trained(folder) and has_ended_well:
            return "done", "all steps are done"
        return _state_of_job(last, "waiting", f"{end.stage} is done, the next stage follows", "")
    if end.exit_code == INTERRUPTED:
        return "stopped", f"{end.stage}: interrupted by the user; {_SAME_COMMAND}"
    if end.exit_code == RESUME_LATER:
        is_continued = True
        why = f"{end.stage}: saved"
        if end.retry is None and job is not None and job.name == "FAILED":
            # Slurm's word for every exit code but 0. A stage that saved and asks for no other
            # attempt was stopped by its user (scancel --signal=INT, Ctrl-C).
            return "stopped", f"{why}, as it was asked to; {_SAME_COMMAND}"
    else:
        is_continued = False
        why = f"{end.stage}: {end.error or f'exit code {end.exit_code}'}"
    if end.retry is not None:
        is_continued = end.retry.again
        why += f" ({end.retry.why})"
    if is_continued:
        return _state_of_job(last, "waiting", why, f"; {_RESUMES}")
    return "failed", why


def _is_gone(owner: LockOwner) -> bool:
    """Whether a process has ended.

    That is known on its own machine, or from Slurm if its job runs no longer.
    """
    if owner.is_gone:
        return True
    if not owner.job:
        return False
    job = slurm_job(owner.job)
    return job is not None and job.kind != "running"


def _state_without_reason(stage: str, last: Attempt) -> tuple[State, str]:
    """The state after an attempt that put no end on record.

    Its processes were killed, or the job is about to end.
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
    job = _job_of(last)
    if job is None:
        return otherwise, unknown or f"{why}{resumes}"
    assert last.start is not None
    number = last.start.by.job
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
    facts = {"run": status.folder, "state": f"{status.state}: {status.why}"}
    if status.steps:
        share = status.step / status.steps
        facts["step"] = f"{status.step:,} of {status.steps:,} ({share:.1%})"
    if status.stage is not None:
        facts["stage"] = status.stage
    if status.tokens_seen is not None:
        facts["tokens"] = f"{status.tokens_seen:,}"
    if status.loss is not None:
        facts["loss"] = f"{status.loss:.4f}"
    for trend in status.heldout:
        shown = " → ".join(map(readable, trend.perplexity))
        steps = ", ".join(f"{step:,}" for step in trend.steps)
        facts[trend.corpus] = f"held-out perplexity {shown} at step {steps}"
    if status.tokens_per_second:
        facts["speed"] = f"{status.tokens_per_second:,.0f} tokens/s"
    facts["restarts"] = f"{status.restarts} so far"
    if status.skipped_steps:
        facts["skipped"] = f"{status.skipped_steps} step(s)"
    facts["checkpoint"] = "none yet"
    if status.checkpoint_age_s is not None:
        facts["checkpoint"] = f"{status.checkpoint}, {_duration(status.checkpoint_age_s)} old"
    if status.seconds_left is not None:
        facts["end"] = f"after {_duration(status.seconds_left)} of training"
    width = max(10, *map(len, facts))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in facts.items())


def as_lines(statuses: Sequence[RunStatus]) -> str:
    """One line per run: its folder's name, state, steps, and reason."""
    rows: list[tuple[str, ...]] = []
    for run in statuses:
        steps = ""
        if run.steps:
            steps = f"{run.step:,} of {run.steps:,}"
        rows.append((Path(run.folder).name, run.state, steps, run.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
