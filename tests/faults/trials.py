"""Faults that are injected into a run's job, and trials: what such a fault costs, and whether the
run recovers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pipeline.run_folder.checkpoint_names import all_checkpoints, step_in
from tests.disks import SmallDisk
from tests.faults.job import Job, is_launcher
from tests.faults.runs import BRIEF, LASTING, RANKS, SAVE_EVERY, SHAPES, Laboratory, await_that
from tests.slurm.cluster import NODES, Cluster
from tests.waiting import PATIENCE_S


class Result(NamedTuple):
    """What the faults of one kind did: how often they were injected, and what the worst of them
    cost.

    Seconds of a job go to its first new step, with five in place of Slurm's two minutes between
    attempts. The sequence is equal if the metrics of every run are those of an undisturbed one, bit
    for bit.
    """

    times: int
    steps_lost: int
    seconds_to_resume: float | None
    sequence_equal: bool


Injection = Callable[[Job], object]
WhileDown = Callable[[Job], int]
"""Changes something while the job is down; returns the step from which it must resume."""


# --- What is injected -----------------------------------------------------------------------------


def requeue(job: Job) -> None:
    """As a scheduler does that needs the nodes for another job."""
    job.cluster.scontrol("requeue", str(job.id))


def terminate(job: Job) -> None:
    """SIGTERM to every rank."""
    job.cluster.run("scancel", "--signal=TERM", str(job.id))


LIMITED = ("--time=30", "--signal=B:USR1@900")


def come_near_the_time_limit(job: Job) -> None:
    """Lowers the limit of a LIMITED job: Slurm sends its signal at the next check, within half a
    minute."""
    job.cluster.scontrol("update", f"JobId={job.id}", "TimeLimit=14")


def lift_the_time_limit(job: Job) -> int:
    """For the next attempt."""
    job.cluster.scontrol("update", f"JobId={job.id}", "TimeLimit=30")
    return job.run.saved_step


def kill_rank(job: Job) -> None:
    """SIGKILL to rank 1, as the kernel does when memory is exhausted."""
    job.stop_between_checkpoints().kill()


def kill_launcher(job: Job) -> None:
    """SIGKILL to srun."""
    _kill_in_training(job, is_launcher)


def kill_batch_script(job: Job) -> None:
    """SIGKILL to the shell that runs slurm/cpt_korean.sh."""
    _kill_in_training(job, lambda process: process.name() == "bash")


def _kill_in_training(job: Job, described: Callable[[psutil.Process], bool]) -> None:
    """Rank 1 is suspended until Slurm has noticed: a short run could end before."""
    rank = job.stop_between_checkpoints()
    job.process(described).kill()
    await_that(
        lambda: job.cluster.job(job.id)["JobState"] != "RUNNING",
        "that Slurm notices the end of a process",
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.resume()


def lose_node(job: Job) -> None:
    """SIGKILL to node n2's slurmd and all of the job's processes there, as in a power failure;
    slurmd comes back."""
    job.stop_between_checkpoints()
    doomed = job.processes(lambda process: process.environ().get("SLURMD_NODENAME") == "n2")
    keepers = {
        parent
        for process in doomed
        for parent in process.parents()
        if parent.name() == "slurmstepd"
    }
    job.cluster.slurmd("n2").suspend()  # it shall not report their end
    for process in (*keepers, *doomed):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(doomed, timeout=PATIENCE_S)
    job.run.require(not alive, f"{alive} did not end")
    job.cluster.restart_slurmd("n2")


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
    *_, before, newest = all_checkpoints(job.run.checkpoints)
    damage(newest)
    return step_in(before.name) or 0


def _of_rank(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rank_{rank:05d}.safetensors"


# --- What becomes of the run ----------------------------------------------------------------------


def newest_checkpoint(job: Job) -> int:
    """The step from which a run resumes if its checkpoints are intact."""
    return job.run.saved_step


def stop_and_resume(
    laboratory: Laboratory,
    cluster: Cluster,
    *,
    inject: Injection,
    shape: str = BRIEF,
    loses_steps: bool | None = True,
    while_down: WhileDown = newest_checkpoint,
    checkpoints_before: int = 1,
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None,
) -> Result:
    """Stops a job once, after `checkpoints_before` checkpoints, and lets it resume.

    `loses_steps` says whether some must be computed again, none must, or either may be. `changes`
    are those of the run's settings, `options` those of sbatch, `environment` is the job's.
    """
    run = laboratory.new_run(shape, **(changes or {}))
    job = Job(cluster, run, options=options, **(environment or {}))
    job.wait_between_checkpoints(checkpoints_before)
    lost, seconds = interrupt(job, inject, while_down)
    job.finish()
    run.require(loses_steps in (None, lost > 0), f"{lost} steps were lost")
    return Result(1, lost, seconds, laboratory.is_undisturbed(run))


def damage_the_newest(
    laboratory: Laboratory, cluster: Cluster, *, damage: Callable[[Path], None]
) -> Result:
    """Damages the newest checkpoint of a job that is queued again."""
    while_down = partial(to_the_newest, damage)
    return stop_and_resume(
        laboratory, cluster, inject=requeue, while_down=while_down, checkpoints_before=2
    )


def interrupt(
    job: Job, inject: Injection, while_down: WhileDown = newest_checkpoint
) -> tuple[int, float]:
    """Stops the job with `inject`, waits until it is requeued, and starts it at once; steps lost,
    seconds to resume.

    Raises:
        TrialError: the job was not stopped, not requeued, or resumed from another step than
        expected.
    """
    run, restarts, struck = job.run, int(job.cluster.job(job.id)["Restarts"]), time.monotonic()
    inject(job)
    job.wait_until_requeued(restarts)
    last_step, printed = run.step, len(run.output)
    expected = while_down(job)
    job.cluster.start_now(job.id)
    job.wait_until(
        lambda: run.trains_again(printed) or run.is_done, "the first step after the fault"
    )
    seconds = time.monotonic() - struck
    resumed = run.resumed_steps[-1] if run.resumed_steps else 0
    # The newest checkpoint may be one that was damaged meanwhile.
    most = SAVE_EVERY * (1 if while_down is newest_checkpoint else 2)
    found = f"it resumed from step {resumed} after step {last_step}, expected {expected} and at most {most} lost"
    run.require(resumed == expected and last_step - resumed <= most, found)
    return last_step - resumed, seconds


def restart_daemons(laboratory: Laboratory, cluster: Cluster) -> Result:
    """SIGKILL to each node's slurmd, whose children survive; it comes back, and the job continues
    without a restart."""
    run = laboratory.new_run(LASTING)
    job = Job(cluster, run)
    seconds = 0.0
    for node in NODES:
        job.wait_between_checkpoints()
        struck = time.monotonic()
        cluster.restart_slurmd(node)
        job.wait_for_step(run.step + 1)
        seconds = max(seconds, time.monotonic() - struck)
    run.require(run.step < run.steps, "it was done before the last fault")
    job.finish(restarts=0)
    return Result(len(NODES), 0, seconds, laboratory.is_undisturbed(run))


def fill_the_disk(laboratory: Laboratory, cluster: Cluster) -> Result:
    """Runs a job that saves to a small disk, which another program fills during the run."""
    run = laboratory.new_run(BRIEF)
    disk = SmallDisk(run.checkpoints, mib=64)
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
        found = f"saved {saved}, full at {failed_at}, then saved {run.saved_step}"
        run.require(saved < failed_at < run.saved_step == run.steps, found)
    finally:
        disk.remove()
    return Result(1, 0, seconds, laboratory.is_undisturbed(run))


def poison_a_batch(
    laboratory: Laboratory, cluster: Cluster, *, stays: bool, step: int = 13
) -> Result:
    """Runs a job with a NaN in a batch of rank 1 in that step, whenever it is read or only the
    first time."""
    skipped = (step,) if stays else ()  # else the step is computed again
    run = laboratory.new_run(BRIEF)
    strokes = run.folder / "strokes"
    global_batch, micro_batch = (
        SHAPES[BRIEF][f"schedule__{name}_batch_size"] for name in ("global", "micro")
    )
    batch = (step - 1) * (global_batch // micro_batch // RANKS) + 1
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parent / "poison"), os.environ.get("PYTHONPATH")))
    )
    poison = json.dumps({"rank": 1, "micro_batch": batch, "stays": stays, "strokes": str(strokes)})
    job = Job(cluster, run, PYTHONPATH=path, POISON=poison)
    job.wait_for_step(step)
    done = time.time()
    job.finish(restarts=0)
    times = [float(line) for line in strokes.read_text(encoding="utf-8").splitlines()]
    run.require(len(times) == (2 if stays else 1), f"struck {len(times)} times")
    run.require(
        f"step {step}: its loss or gradient is not finite" in run.output, "the NaN was not noticed"
    )
    return Result(1, 1, done - times[0], laboratory.is_undisturbed(run, skipped))
