"""A disk that is full during a save and free again later: training continues without that checkpoint."""

from __future__ import annotations

import time

from tests.disks import SmallDisk
from tests.faults.job import Job
from tests.faults.runs import BRIEF, Laboratory, TrialError
from tests.faults.table import Result
from tests.slurm.cluster import Cluster


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
        job.finish()
        if not saved < failed_at < run.saved_step == run.shape.steps:
            raise TrialError(f"saved {saved}, full at {failed_at}, then saved {run.saved_step}\n{run.output}")
        if job.restarts:
            raise TrialError(f"{run.folder}: it was started again {job.restarts} times, expected none\n{run.output}")
    finally:
        disk.remove()
    return Result(fault, 1, 0, seconds, laboratory.is_undisturbed(run))
