"""A NaN in a batch: once, so that the step is recomputed; or in the data, so that the step is skipped."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.faults.job import Job
from tests.faults.runs import BRIEF, RANKS, Laboratory, TrialError
from tests.faults.table import Result
from tests.slurm.cluster import Cluster

STEP = 13
"""In this step rank 1 reads the poisoned batch."""
MODULE = Path(__file__).parent / "poison"


def poison_a_batch(fault: str, laboratory: Laboratory, cluster: Cluster, *, stays: bool) -> Result:
    """Runs a job with a NaN in one batch, whenever that is read or only the first time."""
    shape = BRIEF
    skipped = (STEP,) if stays else ()
    laboratory.undisturbed(shape, skipped)
    run = laboratory.new_run(shape)
    strokes = run.folder / "strokes"
    micro_batches = shape.global_batch_size // shape.micro_batch_size // RANKS
    poison = {"rank": 1, "micro_batch": (STEP - 1) * micro_batches + 1, "stays": stays, "strokes": str(strokes)}
    path = os.pathsep.join(filter(None, (str(MODULE), os.environ.get("PYTHONPATH"))))
    job = Job(cluster, run, PYTHONPATH=path, POISON=json.dumps(poison))
    job.wait_for_step(STEP)
    done = time.time()
    job.finish()
    times = [float(line) for line in strokes.read_text(encoding="utf-8").splitlines()]
    if len(times) != (2 if stays else 1) or f"step {STEP}: its loss or gradient is not finite" not in run.output:
        raise TrialError(f"struck {len(times)} times\n{run.output}")
    if job.restarts:
        raise TrialError(f"{run.folder}: it was started again {job.restarts} times, expected none\n{run.output}")
    remarks = f"compared with a run that skips step {STEP}" if stays else "the step is recomputed"
    equal = laboratory.is_undisturbed(run, skipped)
    return Result(fault, 1, 1, done - times[0], equal, remarks)
