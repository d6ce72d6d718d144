"""Faults that are injected into a job: Slurm commands, signals to its processes, and damage to a checkpoint."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil

from tests.faults.job import Job
from tests.faults.runs import await_that

Injection = Callable[[Job], None]


def requeue(job: Job) -> None:
    """Requeues the job, as a scheduler does that needs the nodes for another."""
    job.cluster.scontrol("requeue", str(job.id))


def terminate(job: Job) -> None:
    """SIGTERM to every rank."""
    job.cluster.run("scancel", "--signal=TERM", str(job.id))


ANNOUNCED_LIMIT = ("--time=10", "--signal=B:USR1@60")


def come_near_the_time_limit(job: Job) -> None:
    """Lowers the limit so that Slurm sends its signal at the next check, within half a minute."""
    started = datetime.fromisoformat(job.cluster.job(job.id)["StartTime"])
    minutes = math.ceil(((datetime.now() - started).total_seconds() + 30) / 60)
    job.cluster.scontrol("update", f"JobId={job.id}", f"TimeLimit={minutes}")


def lift_the_time_limit(job: Job) -> int:
    """Removes the limit for the next attempt; returns the step from which that must resume."""
    job.cluster.scontrol("update", f"JobId={job.id}", "TimeLimit=UNLIMITED")
    return job.run.saved_step


def kill_rank(job: Job) -> None:
    """SIGKILL to rank 1, as the kernel does when memory is exhausted."""
    process = job.rank(1)
    job.stop_between_checkpoints(process)
    _kill(process)


def kill_launcher(job: Job) -> None:
    """SIGKILL to srun."""
    _kill(job.launcher)


def kill_batch_script(job: Job) -> None:
    """SIGKILL to the shell that runs slurm/cpt_korean.sh."""
    _kill(job.batch_script)


def kill_any(job: Job, draw: random.Random) -> None:
    """SIGKILL to a random process among srun and the ranks, once one of them runs."""
    await_that(lambda: bool(job.working), f"{job.run.folder}: a process to kill")
    _kill(draw.choice(job.working))


def stop_rank(job: Job) -> None:
    """SIGSTOP to rank 1: it keeps its connections open and does nothing."""
    job.stop_between_checkpoints(job.rank(1))


def restart_daemon(job: Job, node: str) -> None:
    """SIGKILL to a node's slurmd, whose children survive; then restarts it."""
    job.cluster.kill_slurmd(node)
    job.cluster.start_slurmd(node)


def lose_node(job: Job) -> None:
    """SIGKILL to node n2's slurmd and all of the job's processes there, as in a power failure; restarts slurmd."""
    job.stop_between_checkpoints(job.rank(1))
    doomed = job.processes_on("n2")
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
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


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


def done_to_the_newest(damage: Callable[[Path], None]) -> Callable[[Job], int]:
    """Damages a job's newest checkpoint; returns the step of the one before, from which the run must resume."""

    def strike(job: Job) -> int:
        *_, before, newest = job.run.checkpoints
        damage(job.run.checkpoints[newest])
        return before

    return strike


def _of_rank(checkpoint: Path, rank: int) -> Path:
    (file,) = checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file


def _kill(process: psutil.Process) -> None:
    process.kill()
    await_that(lambda: _is_dead(process), f"the end of process {process.pid}")


def _is_dead(process: psutil.Process) -> bool:
    """Whether it has ended; its parent may not have waited for it yet."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
