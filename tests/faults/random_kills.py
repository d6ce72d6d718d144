"""kill -9 at random times of a run: starting, training, saving."""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch

from pipeline.local_ranks import reserved_port
from tests.distributed import processes
from tests.faults.job import Job, is_launcher, is_rank
from tests.faults.runs import BRIEF, RANKS, STAGED, Laboratory, Run, await_that
from tests.faults.trials import Result, interrupt
from tests.slurm.cluster import Cluster, ClusterError
from tests.waiting import PATIENCE_S

OFTEN = 2
"""Saves every two steps."""
IN_A_SAVE_FRACTION = 1 / 3
"""This fraction of the kills waits for the next save: saves are short, and random times rarely hit
them."""
EXIT_GRACE_S = 3.0
"""A rank whose peers die before the rendezvous waits for half an hour unless its launcher ends it.
"""
BORDER_S = 2.0
"""About how long a border takes here: a save, and a start from it."""
_VICTIMS = (slice(0, 1), slice(1, 2), slice(None))


@contextlib.contextmanager
def local_ranks(run: Run) -> Iterator[list[Any]]:
    """An attempt of a run: its ranks as processes of this machine, which leaving the block kills.

    They run the same program as slurm/launch.sh, in the same environment, forked from a server that
    has imported everything: training starts after a second.
    """
    with reserved_port() as port:
        ranks = [
            processes.Process(target=_train, args=(run, rank, port), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            yield ranks
        finally:
            kill(ranks)


def _train(run: Run, rank: int, port: int) -> None:
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    descriptor = os.open(run.log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["scale-cpt", "train", str(run.config)]
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)


def kill(ranks: Sequence[Any]) -> bool:
    """Kills these ranks; returns False if all of them had already ended."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()
    return any(process.exitcode == -signal.SIGKILL for process in ranks)


def have_ended(ranks: Sequence[Any], timeout_s: float = 0.0) -> bool:
    """Waits at most `timeout_s` for all ranks; returns whether they ended."""
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode is not None for process in ranks)


def kill_at_random(
    laboratory: Laboratory,
    _: Cluster | None = None,
    *,
    kills: int,
    seed: int,
    asynchronous: bool = False,
) -> Result:
    """Trains runs as plain processes, and kills one or both ranks, until there were `kills` kills."""
    draw = random.Random(seed)
    whole_s = laboratory.undisturbed(BRIEF)[1]
    done, lost, equal = 0, 0, True
    while done < kills:
        run = laboratory.new_run(
            BRIEF, checkpoints={"every_steps": OFTEN, "asynchronous": asynchronous}
        )
        while done < kills and _is_killed(run, draw.uniform(0, whole_s), draw):
            done, lost = done + 1, max(lost, run.step - run.saved_step)
        if not run.is_done:
            _is_killed(run, PATIENCE_S, draw)
        equal = equal and laboratory.is_undisturbed(run)
    return Result(done, lost, None, equal)


def kill_at_borders(
    laboratory: Laboratory, _: Cluster | None = None, *, kills: int, seed: int
) -> Result:
    """Trains runs in stages, and kills one or both ranks around a border between two stages: in its
    save, in the making of the next engine, or in the steps that follow.

    Only the borders save, so that a kill before one is saved repeats the whole stage before it.
    """
    draw = random.Random(seed)
    done, lost, equal = 0, 0, True
    while done < kills:
        run = laboratory.new_run(STAGED, checkpoints={"every_steps": 1000})
        for border in run.borders:
            if done < kills and _is_killed(run, draw.uniform(0, BORDER_S), draw, after_step=border):
                done, lost = done + 1, max(lost, run.step - run.saved_step)
        if not run.is_done:
            _is_killed(run, PATIENCE_S, draw)
        equal = equal and laboratory.is_undisturbed(run)
    return Result(done, lost, None, equal)


def _is_killed(run: Run, lives_s: float, draw: random.Random, *, after_step: int = 0) -> bool:
    """Starts a run and kills ranks of it after `lives_s` seconds, or in the first save after that.

    The seconds count from the start, or from when the run has logged `after_step`.

    Returns False if it finished before. Raises TrialError if it failed without a kill, or resumed
    from another checkpoint than the newest.
    """
    left_over, printed, saved = run.unfinished_saves, len(run.output), run.saved_step
    resumptions, in_a_save = len(run.resumed_steps), draw.random() < IN_A_SAVE_FRACTION
    with local_ranks(run) as ranks:
        while run.step < after_step and not have_ended(ranks):
            time.sleep(0.01)
        have_ended(ranks, lives_s)
        while in_a_save and not run.unfinished_saves - left_over and not have_ended(ranks):
            time.sleep(0.001)
        killed = not have_ended(ranks) and kill(ranks[draw.choice(_VICTIMS)])
        if not killed:
            have_ended(ranks, PATIENCE_S)
            codes = [process.exitcode for process in ranks]
            run.require(codes == [0] * RANKS, f"ended with {codes}")
        elif run.trains_again(printed):
            run.require(have_ended(ranks, PATIENCE_S), "a rank outlived the other")
        else:
            have_ended(ranks, EXIT_GRACE_S)
    # None if it was killed before it resumed. A run in stages also resumes at each of its borders.
    for place, resumed in enumerate(run.resumed_steps[resumptions:]):
        expected = [saved] if saved > 0 and place == 0 else run.borders
        run.require(resumed in expected, f"it resumed from step {resumed}, not in {expected}")
    return killed


def kill_jobs_at_random(
    laboratory: Laboratory, cluster: Cluster, *, kills: int, seed: int
) -> Result:
    """The same for Slurm jobs, including srun; the first job is not disturbed, to measure how long
    one takes."""
    draw = random.Random(seed)
    done, lost, seconds, equal, whole_s = 0, 0, 0.0, True, 0.0

    def kill_any(job: Job) -> None:
        """SIGKILL to a random process among srun and the ranks, once one of them runs."""

        def working() -> list[psutil.Process]:
            return job.processes(lambda process: is_launcher(process) or is_rank(process))

        await_that(lambda: bool(working()), f"{job.run.folder}: a process to kill")
        draw.choice(working()).kill()

    while done < kills:
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
    return Result(done, lost, seconds, equal)


def _ends_within(job: Job, seconds: float) -> bool:
    try:
        job.cluster.wait(job.id, timeout=seconds)
    except ClusterError:
        return False
    return True
