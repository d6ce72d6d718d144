"""A run as a job of the test cluster: `sbatch slurm/cpt_korean.sh`, and its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from tests.faults.runs import SAVE_EVERY, Run, await_that
from tests.slurm.cluster import FINAL_STATES, Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT


class Job:
    """A submitted run, with one rank on each of both nodes."""

    def __init__(
        self, cluster: Cluster, run: Run, *, options: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.cluster = cluster
        self.run = run
        self._saved_before = 0
        command = (
            f"--output={run.log}",
            *options,
            PROJECT / "slurm" / "cpt_korean.sh",
            run.config,
            "train",
        )
        self.id = cluster.sbatch(*command, cwd=PROJECT, **ON_THE_CPU, **environment)

    def wait_between_checkpoints(self, checkpoints: int = 1) -> None:
        """Waits until it has saved a new checkpoint, at least the given number in all, and is some
        steps past it."""
        run, enough = self.run, max(self._saved_before, (checkpoints - 1) * SAVE_EVERY)

        def between() -> bool:
            return run.saved_step > enough and 2 <= run.step - run.saved_step <= SAVE_EVERY // 2

        self.wait_until(between, "some steps after a checkpoint")
        self._saved_before = run.saved_step

    def stop_between_checkpoints(self) -> psutil.Process:
        """Suspends rank 1 between two checkpoints; if it was about to save, resumes it and waits
        for the next time."""
        rank = self.process(lambda process: is_rank(process) and process.environ()["RANK"] == "1")
        rank.suspend()
        while not 0 < self.run.step - self.run.saved_step < SAVE_EVERY:
            rank.resume()
            self.wait_between_checkpoints()
            rank.suspend()
        return rank

    def wait_for_step(self, step: int) -> None:
        """Waits until it has logged `step`."""
        self.wait_until(lambda: self.run.step >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until `condition` holds; `what` describes it.

        Raises:
            TrialError: the job ended before, or the wait timed out.
        """
        seen = False

        def seen_or_over() -> bool:
            nonlocal seen
            seen = condition()
            return seen or self.cluster.job(self.id)["JobState"] in FINAL_STATES

        await_that(seen_or_over, f"{what} of {self.run.folder}")
        self.run.require(seen, f"the job ended before {what}")

    def wait_until_requeued(self, restarts: int) -> None:
        """Waits until it is pending and was requeued more than `restarts` times.

        A job whose batch script was killed is in state FAILED until its ranks requeue it.
        """
        self.cluster.wait_for(
            self.id, lambda job: job["JobState"] == "PENDING" and int(job["Restarts"]) > restarts
        )

    def finish(self, restarts: int | None = None) -> None:
        """Waits for its end.

        Raises:
            TrialError: it failed, or was started again another number of times than `restarts`.
        """
        end = self.cluster.wait(self.id)
        as_expected = end.state == "COMPLETED" and restarts in (None, end.restarts)
        self.run.require(as_expected, f"the job ended as {end}, expected {restarts} restarts")

    def process(self, described: Callable[[psutil.Process], bool]) -> psutil.Process:
        """Its oldest process that is so described."""
        found = self.processes(described)
        self.run.require(bool(found), f"job {self.id} has no such process")
        return found[0]

    def processes(self, described: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """Its processes that are so described, oldest first; the environment distinguishes another
        cluster's."""
        conf, script = str(self.cluster.conf), f"job{self.id:05d}/slurm_script"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                environment = process.environ()
                own = environment.get("SLURM_JOB_ID") == str(self.id) or script in " ".join(
                    process.cmdline()
                )
                if own and environment.get("SLURM_CONF") == conf and described(process):
                    found.append(process)
        return sorted(found, key=lambda process: (process.create_time(), process.pid))


def is_launcher(process: psutil.Process) -> bool:
    """Whether it is srun itself, not its child that cleans up."""
    parent = process.parent()
    return process.name() == "srun" and parent is not None and parent.name() != "srun"


def is_rank(process: psutil.Process) -> bool:
    """Whether it is the Python process of a rank."""
    return process.name().startswith("python") and "RANK" in process.environ()
