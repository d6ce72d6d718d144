"""Faults that are injected into a run's job, and trials: what such a fault costs, and whether the run recovers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.disks import SmallDisk
from tests.faults.job import Job, is_launcher
from tests.faults.runs import BRIEF, LASTING, RANKS, Laboratory, Shape, TrialError, await_that
from tests.slurm.cluster import Cluster


class Result(NamedTuple):
    """What the faults of one kind did.

    Attributes:
        times: how often it was injected.
        steps_lost: the largest number of steps computed again or skipped.
        seconds_to_resume: the longest from the fault to the first new step, with five seconds in place of Slurm's two
            minutes between attempts.
        sequence_equal: whether the metrics of every run equal those of an undisturbed one, bit for bit.
        remarks: for the terminal and summary.json.
    """

    times: int
    steps_lost: int
    seconds_to_resume: float
    sequence_equal: bool
    remarks: str = ""


Injection = Callable[[Job], object]
WhileDown = Callable[[Job], int]
"""Changes something while the job is down; returns the step from which it must resume."""


# --- What is injected ------------------------------------------------------------------------------------------------


def requeue(job: Job) -> None:
    """As a scheduler does that needs the nodes for another job."""
    job.cluster.scontrol("requeue", str(job.id))


def terminate(job: Job) -> None:
    """SIGTERM to every rank."""
    job.cluster.run("scancel", "--signal=TERM", str(job.id))


def come_near_the_time_limit(job: Job) -> None:
    """Lowers the limit so that Slurm sends its signal at the next check, within half a minute."""
    started = datetime.fromisoformat(job.cluster.job(job.id)["StartTime"])
    minutes = math.ceil(((datetime.now() - started).total_seconds() + 30) / 60)
    job.cluster.scontrol("update", f"JobId={job.id}", f"TimeLimit={minutes}")


def lift_the_time_limit(job: Job) -> int:
    """For the next attempt."""
    job.cluster.scontrol("update", f"JobId={job.id}", "TimeLimit=UNLIMITED")
    return job.run.saved_step


def kill_rank(job: Job) -> None:
    """SIGKILL to rank 1, as the kernel does when memory is exhausted."""
    _kill(job.stop_between_checkpoints())


def kill_launcher(job: Job) -> None:
    """SIGKILL to srun."""
    _kill_in_training(job, is_launcher, "srun")


def kill_batch_script(job: Job) -> None:
    """SIGKILL to the shell that runs slurm/cpt_korean.sh."""

    def noticed() -> bool:
        return job.cluster.job(job.id)["JobState"] != "RUNNING"

    _kill_in_training(job, lambda process: process.name() == "bash", "batch script", noticed)


def restart_daemon(node: str, job: Job) -> None:
    """SIGKILL to a node's slurmd, whose children survive; then restarts it."""
    job.cluster.kill_slurmd(node)
    job.cluster.start_slurmd(node)


def lose_node(job: Job) -> None:
    """SIGKILL to node n2's slurmd and all of the job's processes there, as in a power failure; restarts slurmd."""
    job.stop_between_checkpoints()
    doomed = job.processes(lambda process: process.environ().get("SLURMD_NODENAME") == "n2")
    keepers = {parent for process in doomed for parent in process.parents() if parent.name() == "slurmstepd"}
    job.cluster.kill_slurmd("n2")
    for process in (*keepers, *doomed):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await_that(lambda: all(map(_is_dead, doomed)), "the end of all that runs on node n2")
    job.cluster.start_slurmd("n2")


def truncate(checkpoint: Path) -> None:
    """Removes the second half of a file."""
    file = _of_rank(checkpoint, 1)
    os.truncate(file, file.stat().st_size // 2)


def flip_bit(checkpoint: Path) -> None:
    """Flips a random bit of a file (seed 5)."""
    file = _of_rank(checkpoint, 0)
    content = bytearray(file.read_bytes())
    place = random.Random(5).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)


def lose_file(checkpoint: Path) -> None:
    """Removes the file of rank 1."""
    _of_rank(checkpoint, 1).unlink()


def to_the_newest(damage: Callable[[Path], None], job: Job) -> int:
    """Damages a job's newest checkpoint; the run must resume from the one before."""
    *_, before, newest = job.run.checkpoints
    damage(job.run.checkpoints[newest])
    return before


def _of_rank(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rank_{rank:05d}.safetensors"


def _kill_in_training(
    job: Job, described: Callable[[psutil.Process], bool], what: str, noticed: Callable[[], bool] = lambda: True
) -> None:
    """SIGKILL to a process of the job. Rank 1 is suspended until it is `noticed`: a short run could end before."""
    rank = job.stop_between_checkpoints()
    _kill(job.process(described, what))
    await_that(noticed, f"Slurm to notice the end of {what}")
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.resume()


def _kill(process: psutil.Process) -> None:
    process.kill()
    await_that(lambda: _is_dead(process), f"the end of process {process.pid}")


def _is_dead(process: psutil.Process) -> bool:
    """Whether it has ended; its parent may not have waited for it yet."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


# --- What becomes of the run -----------------------------------------------------------------------------------------


def newest_checkpoint(job: Job) -> int:
    """The step from which a run resumes if its checkpoints are intact."""
    return job.run.saved_step


def stop_and_resume(
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
    lost, seconds = interrupt(job, inject, while_down)
    job.finish()
    if loses_steps is not None and loses_steps != (lost > 0):
        raise TrialError(f"{lost} steps were lost, expected {'some' if loses_steps else 'none'}\n{run.output}")
    return Result(1, lost, seconds, laboratory.is_undisturbed(run), remarks)


def interrupt(job: Job, inject: Injection, while_down: WhileDown = newest_checkpoint) -> tuple[int, float]:
    """Stops the job with `inject`, waits until it is requeued, and starts it at once; steps lost, seconds to resume.

    Raises:
        TrialError: the job was not stopped, not requeued, or resumed from another step than expected.
    """
    run, restarts, struck = job.run, int(job.cluster.job(job.id)["Restarts"]), time.monotonic()
    inject(job)
    job.wait_until_requeued(restarts)
    last_step, printed = run.step, len(run.output)
    expected = while_down(job)
    job.cluster.start_now(job.id)
    job.wait_until(lambda: run.trains_again(printed) or run.is_done, "the first step after the fault")
    seconds = time.monotonic() - struck
    resumed = run.resumed_steps[-1] if run.resumed_steps else 0
    # The newest checkpoint may be one that was damaged meanwhile.
    most = run.shape.save_every * (1 if while_down is newest_checkpoint else 2)
    if resumed != expected or last_step - resumed > most:
        found = f"it resumed from step {resumed} after step {last_step}"
        raise TrialError(f"{run.folder}: {found}, expected {expected} and at most {most} lost\n{run.output}")
    return last_step - resumed, seconds


def survive(laboratory: Laboratory, cluster: Cluster, *, injections: Sequence[Injection]) -> Result:
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
    return Result(len(injections), 0, seconds, laboratory.is_undisturbed(run))


def fill_the_disk(laboratory: Laboratory, cluster: Cluster) -> Result:
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
    return Result(1, 0, seconds, laboratory.is_undisturbed(run))


def poison_a_batch(laboratory: Laboratory, cluster: Cluster, *, stays: bool, step: int = 13) -> Result:
    """Runs a job with a NaN in a batch of rank 1 in that step, whenever it is read or only the first time."""
    skipped = (step,) if stays else ()
    laboratory.undisturbed(BRIEF, skipped)
    run = laboratory.new_run(BRIEF)
    strokes = run.folder / "strokes"
    batch = (step - 1) * (BRIEF.global_batch_size // BRIEF.micro_batch_size // RANKS) + 1
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "poison"), os.environ.get("PYTHONPATH"))))
    poison = json.dumps({"rank": 1, "micro_batch": batch, "stays": stays, "strokes": str(strokes)})
    job = Job(cluster, run, PYTHONPATH=path, POISON=poison)
    job.wait_for_step(step)
    done = time.time()
    job.finish(restarts=0)
    times = [float(line) for line in strokes.read_text(encoding="utf-8").splitlines()]
    if len(times) != (2 if stays else 1) or f"step {step}: its loss or gradient is not finite" not in run.output:
        raise TrialError(f"struck {len(times)} times\n{run.output}")
    remarks = f"compared with a run that skips step {step}" if stays else "the step is recomputed"
    return Result(1, 1, done - times[0], laboratory.is_undisturbed(run, skipped), remarks)
