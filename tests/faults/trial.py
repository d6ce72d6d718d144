"""Injects a fault into a job and measures steps lost, time to resume, and whether the metrics are unchanged."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.disks import SmallDisk
from tests.faults.injections import Injection
from tests.faults.job import Job
from tests.faults.runs import BRIEF, LASTING, RANKS, Laboratory, Shape, TrialError
from tests.faults.table import Result
from tests.slurm.cluster import Cluster

WhileDown = Callable[[Job], int]
"""Changes something while the job is down; returns the step from which it must resume."""


@dataclass(frozen=True)
class Cost:
    """What one fault cost."""

    steps_lost: int
    seconds_to_resume: float


def newest_checkpoint(job: Job) -> int:
    """The step from which a run resumes if its checkpoints are intact."""
    return job.run.saved_step


def stop_and_resume(
    fault: str,
    laboratory: Laboratory,
    cluster: Cluster,
    *,
    inject: Injection,
    shape: Shape = BRIEF,
    loses_steps: bool | None = True,
    while_down: WhileDown = newest_checkpoint,
    checkpoints_before: int = 1,
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None,
    remarks: str = "",
) -> Result:
    """Stops a job once, after `checkpoints_before` checkpoints, and lets it resume.

    `loses_steps` says whether some must be computed again, none must, or either may be. `changes` are those of the
    run's settings, `options` those of sbatch, `environment` is the job's.
    """
    laboratory.undisturbed(shape)
    run = laboratory.new_run(shape, **(changes or {}))
    job = Job(cluster, run, options=options, **(environment or {}))
    job.wait_between_checkpoints(checkpoints_before)
    cost = interrupt(job, inject, while_down)
    job.finish()
    if loses_steps is not None and loses_steps != (cost.steps_lost > 0):
        wanted = "some" if loses_steps else "none"
        raise TrialError(f"{cost.steps_lost} steps were lost, expected {wanted}\n{run.output}")
    return Result(fault, 1, cost.steps_lost, cost.seconds_to_resume, laboratory.is_undisturbed(run), remarks)


def interrupt(job: Job, inject: Injection, while_down: WhileDown = newest_checkpoint) -> Cost:
    """Stops the job with `inject`, waits until it is requeued, and starts it at once.

    Raises:
        TrialError: the job was not stopped, not requeued, or resumed from another step than expected.
    """
    run, restarts, struck = job.run, job.restarts, time.monotonic()
    inject(job)
    job.wait_until_requeued(restarts)
    last_step, printed = run.step, len(run.output)
    expected = while_down(job)
    job.start_now()
    job.wait_until(lambda: run.trains_again(printed) or run.is_done, "the first step after the fault")
    seconds = time.monotonic() - struck
    resumed = run.resumed_steps[-1] if run.resumed_steps else 0
    if resumed != expected:
        raise TrialError(f"{run.folder}: it resumed from step {resumed}, expected {expected}\n{run.output}")
    # The newest checkpoint may be one that was damaged meanwhile.
    most = run.shape.save_every * (1 if while_down is newest_checkpoint else 2)
    if last_step - resumed > most:
        raise TrialError(f"{run.folder}: {last_step - resumed} steps were lost, expected {most} at most\n{run.output}")
    return Cost(last_step - resumed, seconds)


def survive(fault: str, laboratory: Laboratory, cluster: Cluster, *, injections: Sequence[Injection]) -> Result:
    """Injects each fault into a job, which must continue without a restart."""
    laboratory.undisturbed(LASTING)
    run = laboratory.new_run(LASTING)
    job = Job(cluster, run)
    seconds = 0.0
    for inject in injections:
        job.wait_between_checkpoints()
        struck = time.monotonic()
        inject(job)
        job.wait_for_step(run.step + 1)
        seconds = max(seconds, time.monotonic() - struck)
    if run.step == run.shape.steps:
        raise TrialError(f"{run.folder}: it was done before the last fault\n{run.output}")
    job.finish(restarts=0)
    return Result(fault, len(injections), 0, seconds, laboratory.is_undisturbed(run))


def fill_the_disk(fault: str, laboratory: Laboratory, cluster: Cluster) -> Result:
    """Runs a job that saves to a small disk, which another program fills during the run."""
    laboratory.undisturbed(BRIEF)
    run = laboratory.new_run(BRIEF)
    disk = SmallDisk(run.folder / "checkpoints", mib=64)
    try:
        job = Job(cluster, run)
        job.wait_between_checkpoints()
        disk.fill()
        job.wait_until(lambda: "was not saved" in run.output, "a save that fails")
        struck, failed_at, saved = time.monotonic(), run.step, run.saved_step
        job.wait_for_step(failed_at + 1)
        seconds = time.monotonic() - struck
        disk.free()
        job.finish(restarts=0)
        if not saved < failed_at < run.saved_step == run.shape.steps:
            raise TrialError(f"saved {saved}, full at {failed_at}, then saved {run.saved_step}\n{run.output}")
    finally:
        disk.remove()
    return Result(fault, 1, 0, seconds, laboratory.is_undisturbed(run))


_POISON = Path(__file__).parent / "poison"


def poison_a_batch(fault: str, laboratory: Laboratory, cluster: Cluster, *, stays: bool, step: int = 13) -> Result:
    """Runs a job with a NaN in a batch of rank 1 in that step, whenever it is read or only the first time."""
    skipped = (step,) if stays else ()
    laboratory.undisturbed(BRIEF, skipped)
    run = laboratory.new_run(BRIEF)
    strokes = run.folder / "strokes"
    batch = (step - 1) * (BRIEF.global_batch_size // BRIEF.micro_batch_size // RANKS) + 1
    path = os.pathsep.join(filter(None, (str(_POISON), os.environ.get("PYTHONPATH"))))
    poison = json.dumps({"rank": 1, "micro_batch": batch, "stays": stays, "strokes": str(strokes)})
    job = Job(cluster, run, PYTHONPATH=path, POISON=poison)
    job.wait_for_step(step)
    done = time.time()
    job.finish(restarts=0)
    times = [float(line) for line in strokes.read_text(encoding="utf-8").splitlines()]
    if len(times) != (2 if stays else 1) or f"step {step}: its loss or gradient is not finite" not in run.output:
        raise TrialError(f"struck {len(times)} times\n{run.output}")
    remarks = f"compared with a run that skips step {step}" if stays else "the step is recomputed"
    return Result(fault, 1, 1, done - times[0], laboratory.is_undisturbed(run, skipped), remarks)
