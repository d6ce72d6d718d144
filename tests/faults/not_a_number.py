"""A NaN in a batch: by chance, so that the step is computed again; or in the data, so that it is skipped."""

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
"""The one that is struck: in it the second rank reads the poisoned batch."""
MODULE = Path(__file__).parent / "poison"


def poison_a_batch(fault: str, laboratory: Laboratory, cluster: Cluster, *, stays: bool) -> Result:
    """A job one of whose batches holds a NaN, each time it is read or only the first."""
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
    remarks = f"beside a run that skips step {STEP}" if stays else "the step is computed again"
    equal = laboratory.is_undisturbed(run, skipped)
    return Result(fault, 1, 1, done - times[0], equal, remarks)
