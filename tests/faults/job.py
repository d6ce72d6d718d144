"""A run as a job of the test cluster: `sbatch slurm/cpt_korean.sh`, and its processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psutil

from tests.faults.runs import Run, TrialError, await_that
from tests.slurm.cluster import FINAL_STATES, Cluster
from tests.slurm.daemons import ClusterError
from tests.slurm.jobs import PROJECT
from tests.waiting import PATIENCE_S

_BETWEEN_QUESTIONS_S = 1.0
"""How often Slurm is asked whether a job still runs."""
_STAYS_FAILED_S = 120.0
"""After this time in a final state a job counts as not requeued."""


class Job:
    """A submitted run, with one rank on each of both nodes."""

    def __init__(self, cluster: Cluster, run: Run, *, options: tuple[str, ...] = (), **environment: str) -> None:
        self.cluster = cluster
        self.run = run
        self._saved_before = 0
        settings = {"CONFIG": str(run.config), "STAGES": "train", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.id = cluster.sbatch(
            PROJECT / "slurm" / "cpt_korean.sh",
            env=settings | environment,
            args=(f"--output={run.log}", *options),
            cwd=PROJECT,
        )

    @property
    def restarts(self) -> int:
        """How often Slurm has requeued it."""
        return int(self.cluster.job(self.id)["Restarts"])

    @property
    def has_ended(self) -> bool:
        """Whether it is in a final state."""
        return self.cluster.job(self.id)["JobState"] in FINAL_STATES

    def wait_between_checkpoints(self, checkpoints: int = 1) -> None:
        """Waits until it has saved a new checkpoint, at least the given number in all, and is some steps past it."""
        run, enough = self.run, max(self._saved_before, (checkpoints - 1) * self.run.shape.save_every)

        def between() -> bool:
            return run.saved_step > enough and 2 <= run.step - run.saved_step <= run.shape.save_every // 2

        self.wait_until(between, "some steps after a checkpoint")
        self._saved_before = run.saved_step

    def stop_between_checkpoints(self, process: psutil.Process) -> None:
        """Suspends a rank between two checkpoints; if it was about to save, resumes it and waits for the next time."""
        process.suspend()
        while not 0 < self.run.step - self.run.saved_step < self.run.shape.save_every:
            process.resume()
            self.wait_between_checkpoints()
            process.suspend()

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
            if time.monotonic() - asked > _BETWEEN_QUESTIONS_S:
                asked = time.monotonic()
                return self.has_ended
            return False

        await_that(seen_or_over, f"{what} of {self.run.folder}")
        if not condition():
            raise TrialError(f"the job ended before {what}\n{self.run.output}")

    def start_now(self) -> None:
        """Skips Slurm's two minutes between attempts."""
        self.cluster.start_now(self.id)

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

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, at most `seconds`; returns whether it ended."""
        with contextlib.suppress(ClusterError):
            self.cluster.wait(self.id, timeout=seconds)
            return True
        return False

    def finish(self, restarts: int | None = None) -> None:
        """Waits for its end.

        Raises:
            TrialError: it failed, or was started again another number of times than `restarts`.
        """
        end = self.cluster.wait(self.id, timeout=PATIENCE_S)
        if end.state != "COMPLETED" or restarts not in (None, end.restarts):
            raise TrialError(f"the job ended as {end}, expected {restarts} restarts\n{self.run.output}")

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        return self._oldest(f"rank {number}", lambda process: _is_rank(process, number))

    @property
    def launcher(self) -> psutil.Process:
        """The srun that started the ranks."""
        return self._oldest("srun", _is_launcher)

    @property
    def batch_script(self) -> psutil.Process:
        """The shell that runs slurm/cpt_korean.sh."""
        return self._oldest("batch script", lambda process: process.name() == "bash")

    @property
    def working(self) -> list[psutil.Process]:
        """srun, and the ranks that already run."""
        return [process for process in self._processes() if _holds(_is_launcher, process) or _holds(_is_rank, process)]

    def processes_on(self, node: str) -> list[psutil.Process]:
        """The job's processes on a node, oldest first."""
        return sorted(
            (process for process in self._processes() if process.environ().get("SLURMD_NODENAME") == node),
            key=psutil.Process.create_time,
        )

    def _oldest(self, what: str, described: Callable[[psutil.Process], bool]) -> psutil.Process:
        found = [process for process in self._processes() if _holds(described, process)]
        if not found:
            raise TrialError(f"job {self.id} has no {what}\n{self.run.output}")
        return min(found, key=psutil.Process.create_time)

    def _processes(self) -> Iterator[psutil.Process]:
        """The job's processes; their environment distinguishes them from another cluster's."""
        conf, script = str(self.cluster.conf), f"job{self.id:05d}/slurm_script"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                own = environment.get("SLURM_JOB_ID") == str(self.id) or any(
                    script in word for word in process.cmdline()
                )
                if own and environment.get("SLURM_CONF") == conf:
                    yield process


def _is_launcher(process: psutil.Process) -> bool:
    """Whether it is srun itself, not its child that cleans up."""
    parent = process.parent()
    return process.name() == "srun" and parent is not None and parent.name() != "srun"


def _is_rank(process: psutil.Process, number: int | None = None) -> bool:
    """Whether it is the Python process of rank `number`, or of any rank."""
    rank = process.environ().get("RANK")
    return process.name().startswith("python") and rank is not None and number in (None, int(rank))


def _holds(described: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        return described(process)
    return False
