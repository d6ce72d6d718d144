"""A run as a job of the test cluster: `sbatch slurm/cpt_korean.sh`, and its processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from tests.faults.runs import Run, TrialError, await_that
from tests.slurm.cluster import FINAL_STATES, Cluster
from tests.slurm.jobs import PROJECT
from tests.waiting import PATIENCE_S

_STAYS_FAILED_S = 120.0
"""After this time in a final state a job counts as not requeued."""


class Job:
    """A submitted run, with one rank on each of both nodes."""

    def __init__(self, cluster: Cluster, run: Run, *, options: tuple[str, ...] = (), **environment: str) -> None:
        self.cluster = cluster
        self.run = run
        self._saved_before = 0
        settings = {"CONFIG": str(run.config), "STAGES": "train", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        script, args = PROJECT / "slurm" / "cpt_korean.sh", (f"--output={run.log}", *options)
        self.id = cluster.sbatch(script, env=settings | environment, args=args, cwd=PROJECT)

    def wait_between_checkpoints(self, checkpoints: int = 1) -> None:
        """Waits until it has saved a new checkpoint, at least the given number in all, and is some steps past it."""
        run, enough = self.run, max(self._saved_before, (checkpoints - 1) * self.run.shape.save_every)

        def between() -> bool:
            return run.saved_step > enough and 2 <= run.step - run.saved_step <= run.shape.save_every // 2

        self.wait_until(between, "some steps after a checkpoint")
        self._saved_before = run.saved_step

    def stop_between_checkpoints(self) -> psutil.Process:
        """Suspends rank 1 between two checkpoints; if it was about to save, resumes it and waits for the next time."""
        process = self.process(_is_rank_1, "rank 1")
        process.suspend()
        while not 0 < self.run.step - self.run.saved_step < self.run.shape.save_every:
            process.resume()
            self.wait_between_checkpoints()
            process.suspend()
        return process

    def wait_for_step(self, step: int) -> None:
        """Waits until it has logged `step`."""
        self.wait_until(lambda: self.run.step >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until `condition` holds; `what` describes it.

        Raises:
            TrialError: the job ended before, or the wait timed out.
        """
        asked = time.monotonic()

        def seen_or_over() -> bool:
            nonlocal asked
            if condition():
                return True
            if time.monotonic() - asked > 1:  # asking Slurm costs
                asked = time.monotonic()
                return self.cluster.job(self.id)["JobState"] in FINAL_STATES
            return False

        await_that(seen_or_over, f"{what} of {self.run.folder}")
        if not condition():
            raise TrialError(f"the job ended before {what}\n{self.run.output}")

    def wait_until_requeued(self, restarts: int) -> None:
        """Waits until it is pending and was requeued more than `restarts` times.

        A job whose batch script was killed is in state FAILED until its ranks requeue it.
        """
        failed_since: float | None = None

        def queued(job: dict[str, str]) -> bool:
            nonlocal failed_since
            if job["JobState"] in FINAL_STATES:
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > _STAYS_FAILED_S:
                    raise TrialError(f"the job is not queued again but {job['JobState']}\n{self.run.output}")
            return job["JobState"] == "PENDING" and int(job["Restarts"]) > restarts

        self.cluster.wait_for(self.id, queued, timeout=PATIENCE_S)

    def finish(self, restarts: int | None = None) -> None:
        """Waits for its end.

        Raises:
            TrialError: it failed, or was started again another number of times than `restarts`.
        """
        end = self.cluster.wait(self.id, timeout=PATIENCE_S)
        if end.state != "COMPLETED" or restarts not in (None, end.restarts):
            raise TrialError(f"the job ended as {end}, expected {restarts} restarts\n{self.run.output}")

    def process(self, described: Callable[[psutil.Process], bool], what: str) -> psutil.Process:
        """Its oldest process that is so described."""
        if not (found := self.processes(described)):
            raise TrialError(f"job {self.id} has no {what}\n{self.run.output}")
        return found[0]

    def processes(self, described: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """Its processes that are so described, oldest first; the environment distinguishes another cluster's."""
        conf, script = str(self.cluster.conf), f"job{self.id:05d}/slurm_script"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                environment = process.environ()
                own = environment.get("SLURM_JOB_ID") == str(self.id) or script in " ".join(process.cmdline())
                if own and environment.get("SLURM_CONF") == conf and described(process):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found)]


def is_launcher(process: psutil.Process) -> bool:
    """Whether it is srun itself, not its child that cleans up."""
    parent = process.parent()
    return process.name() == "srun" and parent is not None and parent.name() != "srun"


def is_rank(process: psutil.Process) -> bool:
    """Whether it is the Python process of a rank."""
    return process.name().startswith("python") and "RANK" in process.environ()


def _is_rank_1(process: psutil.Process) -> bool:
    return is_rank(process) and process.environ()["RANK"] == "1"
