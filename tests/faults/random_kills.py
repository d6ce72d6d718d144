"""kill -9 at random times of a run: starting, training, saving."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from tests.faults.job import Job, is_launcher, is_rank
from tests.faults.runs import BRIEF, Laboratory, Run, TrialError, await_that, finish, have_ended, kill, local_ranks
from tests.faults.trials import Result, interrupt
from tests.slurm.cluster import Cluster, ClusterError
from tests.waiting import PATIENCE_S

SAVE_EVERY = 2
IN_A_SAVE_FRACTION = 1 / 3
"""This fraction of the kills waits for the next save: saves are short, and random times rarely hit them."""
EXIT_GRACE_S = 3.0
"""A rank whose peers die before the rendezvous waits for half an hour unless its launcher ends it."""
_VICTIMS = (slice(0, 1), slice(1, 2), slice(None))


def kill_at_random(
    laboratory: Laboratory, _: Cluster | None = None, *, kills: int, seed: int, asynchronous: bool = False
) -> Result:
    """Trains runs as plain processes, and kills one or both ranks, until there were `kills` kills."""
    draw = random.Random(seed)
    whole_s = laboratory.undisturbed(BRIEF)[1]
    moments: Counter[str] = Counter()
    lost, seconds, equal, runs = 0, 0.0, True, 0
    while moments.total() < kills:
        runs += 1
        run = laboratory.new_run(BRIEF, checkpoints={"every_steps": SAVE_EVERY, "asynchronous": asynchronous})
        struck_at: float | None = None
        while True:
            lives_s = draw.uniform(0, whole_s) if moments.total() < kills else PATIENCE_S
            victims, in_a_save = draw.choice(_VICTIMS), draw.random() < IN_A_SAVE_FRACTION
            moment, first_step_at, killed_at = _attempt(run, lives_s, victims, in_a_save=in_a_save)
            if struck_at is not None and first_step_at is not None:
                seconds = max(seconds, first_step_at - struck_at)
            struck_at = killed_at
            if struck_at is None:
                break
            moments[moment] += 1
            lost = max(lost, run.step - run.saved_step)
        equal = equal and laboratory.is_undisturbed(run)
    when = ", ".join(f"{count} while {moment}" for moment, count in sorted(moments.items()))
    how = f"{runs} runs as plain processes that save every {SAVE_EVERY} steps, seed {seed}; {when}"
    return Result(moments.total(), lost, seconds, equal, how)


def _attempt(run: Run, lives_s: float, victims: slice, *, in_a_save: bool) -> tuple[str, float | None, float | None]:
    """Starts a run and kills it after `lives_s` seconds, or in the first save after that.

    Returns what it was doing when it was killed, the time of its first new step, or None, and the time of the kill, or
    None if it finished before.

    Raises:
        TrialError: it failed without a kill, or resumed from another checkpoint than the newest.
    """
    left_over, printed, saved = run.unfinished_saves, len(run.output), run.saved_step
    resumptions = len(run.resumed_steps)
    first_step_at = struck_at = None
    with local_ranks(run) as ranks:
        deadline = time.monotonic() + lives_s
        while time.monotonic() < deadline and not have_ended(ranks):
            if first_step_at is None and run.trains_again(printed):
                first_step_at = time.monotonic()
            time.sleep(0.02)
        while in_a_save and not run.unfinished_saves - left_over and not have_ended(ranks):
            time.sleep(0.001)
        now = time.monotonic()
        if not have_ended(ranks) and kill(ranks[victims]):
            struck_at = now
            if first_step_at is None:
                have_ended(ranks, EXIT_GRACE_S)
            elif not have_ended(ranks, PATIENCE_S):
                raise TrialError(f"{run.folder}: a rank outlived the other by {PATIENCE_S:.0f} s\n{run.output}")
        else:
            finish(run, ranks)
    for resumed in run.resumed_steps[resumptions:]:  # none if it was killed before it resumed
        if resumed != saved:
            raise TrialError(f"{run.folder}: it resumed from step {resumed}, but {saved} was saved\n{run.output}")
    working = "starting" if first_step_at is None else "training"
    return "saving" if run.unfinished_saves - left_over else working, first_step_at, struck_at


def kill_jobs_at_random(laboratory: Laboratory, cluster: Cluster, *, kills: int, seed: int) -> Result:
    """The same for Slurm jobs, including srun; the first job is not disturbed, to measure how long one takes."""
    laboratory.undisturbed(BRIEF)
    draw = random.Random(seed)
    done, lost, seconds, equal, jobs, whole_s = 0, 0, 0.0, True, 0, 0.0

    def kill_any(job: Job) -> None:
        """SIGKILL to a random process among srun and the ranks, once one of them runs."""

        def working() -> list[Any]:
            return job.processes(lambda process: is_launcher(process) or is_rank(process))

        await_that(lambda: bool(working()), f"{job.run.folder}: a process to kill")
        draw.choice(working()).kill()

    while done < kills or jobs == 0:
        jobs += 1
        run, began = laboratory.new_run(BRIEF), time.monotonic()
        job = Job(cluster, run, MAX_RESTARTS_WITHOUT_PROGRESS=str(kills))
        while whole_s and done < kills:
            if _ends_within(job, draw.uniform(0, whole_s)) or run.is_done:
                break
            steps_lost, to_resume = interrupt(job, kill_any)
            done, lost, seconds = done + 1, max(lost, steps_lost), max(seconds, to_resume)
        job.finish()
        whole_s = whole_s or time.monotonic() - began
        equal = equal and laboratory.is_undisturbed(run)
    return Result(done, lost, seconds, equal, f"{jobs} jobs, seed {seed}")


def _ends_within(job: Job, seconds: float) -> bool:
    try:
        job.cluster.wait(job.id, timeout=seconds)
    except ClusterError:
        return False
    return True
