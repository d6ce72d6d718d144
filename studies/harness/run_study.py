"""Runs a study on this machine: pending tasks as processes, several at a time, until none is left.

Each task is a call of slurm/cpt_korean.sh, as for any run. Finished runs are skipped, others resume
from their checkpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pipeline import log
from pipeline.errors import INTERNAL_FAULT, RESUME_LATER, StudyError
from pipeline.hub import model_folder
from pipeline.installation import shipped
from studies.harness.random_base import make_random_base
from studies.harness.runs import StudyRuns, Task
from studies.harness.study import SCRATCH, load_study

LOG = "log.txt"
_POLL_EVERY_S = 0.2
_logger = log.get_logger(__name__)


def open_study(path: Path, data: Path) -> StudyRuns:
    """The runs of the study in the YAML file `path`; makes its base with random weights, if any.

    Raises:
        ConfigError: the file describes no study, or one of its runs is not possible.
        DataError, BaseModelError: a text is missing, or the base cannot be made.
    """
    study = load_study(path, data)
    if study.base is not None:
        study = study.model_copy(update={"base": model_folder(study.base)})
    # Before anything is written: a mistake in the file is told at once.
    runs = StudyRuns(study, str(path))
    if study.scratch is not None:
        make_random_base(study.scratch, study.folder / SCRATCH)
    runs.check()
    return runs


def run_study(runs: StudyRuns, jobs: int) -> None:
    """Runs everything that is pending, at most `jobs` processes at a time.

    A run that fails is not tried again, and the others go on. Where this is ended early, the
    running processes are stopped: they save, and resume the next time.

    Raises:
        StudyError: a run failed, other than by diverging at one of several learning rates.
        KeyboardInterrupt, SystemExit: a signal asked this process to end.
    """
    _logger.info("%s: %s; %d at a time", runs.study.folder, runs.progress(), jobs)
    scheduler = _Scheduler(runs, jobs)
    try:
        with _deferred_signals() as signals:
            while not signals and scheduler.start_pending():
                time.sleep(_POLL_EVERY_S)
                scheduler.collect_ended()
    finally:
        scheduler.stop()
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(RESUME_LATER)

    failed = list(scheduler.failed.values())
    if failed:
        message = str(failed[0])
        names = list(scheduler.failed)[1:]
        if names:
            message += f"; {len(names)} other(s) failed too: {', '.join(names)}"
        raise StudyError(message, failed[0].exit_code)


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, which the loop acts on between two of its steps.

    So no process is lost between its start and its place in the list of running ones.
    """
    signals: list[int] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda found, _: signals.append(found))
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Scheduler:
    """Starts pending tasks as processes, at most `jobs` at a time; collects those that ended."""

    def __init__(self, runs: StudyRuns, jobs: int) -> None:
        self.runs = runs
        self.jobs = jobs
        self.tasks = runs.pending_tasks()
        self.running: list[_Process] = []
        self.failed: dict[str, StudyError] = {}

    def start_pending(self) -> bool:
        """Starts what can run now; False where nothing runs or waits any more."""
        # A task is pending until its run is finished, whether it runs or has failed.
        started = {process.task.name for process in self.running} | self.failed.keys()
        waiting = [task for task in self.tasks if task.name not in started]
        # A single task gets all cores.
        side_by_side = min(self.jobs, len(self.tasks))
        for task in waiting[: self.jobs - len(self.running)]:
            self.running.append(_Process(task, side_by_side))
        return bool(self.running)

    def collect_ended(self) -> None:
        """Removes the processes that ended, logs how, and asks anew what is pending."""
        ended: list[_Process] = []
        running: list[_Process] = []
        for process in self.running:
            if process.popen.poll() is None:
                running.append(process)
            else:
                ended.append(process)
        if not ended:
            return
        self.running = running
        self.tasks = self.runs.pending_tasks()
        pending = {task.name for task in self.tasks}
        for process in ended:
            name = process.task.name
            # What the folder holds decides, and not the exit code: a run that diverged at one of
            # several learning rates fails, and yet is over.
            if name in pending:
                outcome = "failed"
                self.failed[name] = process.error()
            elif process.popen.returncode:
                outcome = "diverged"
            else:
                outcome = "done"
            took = timedelta(seconds=round(time.monotonic() - process.started))
            _logger.info("%s: %s in %s; %s", name, outcome, took, self.runs.progress())

    def stop(self) -> None:
        """Asks the running processes to save and end, and waits for them."""
        if self.running:
            _logger.info("stopping %d run(s), which save first", len(self.running))
        for process in self.running:
            process.popen.terminate()
        for process in self.running:
            process.popen.wait()


class _Process:
    """A running task. Its output is appended to the run's LOG."""

    def __init__(self, task: Task, side_by_side: int) -> None:
        self.task = task
        self.started = time.monotonic()
        task.run.write()
        self.log = task.run.folder / LOG
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // (side_by_side * task.ranks))
        environment = {
            # Before the user's environment, which may set another number.
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            # The script takes the first python on the path.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PROJECT": str(Path.cwd()),
            "CONFIG": str(task.run.path),
            "STAGES": " ".join(task.stages),
            "NPROC": str(task.ranks),
        }
        command = ["bash", str(shipped() / "slurm" / "cpt_korean.sh")]
        with self.log.open("ab") as file:
            # What an earlier attempt wrote says nothing about this one.
            self._log_start = file.tell()
            # A session of its own: this process passes Ctrl-C on once, and the terminal does not.
            self.popen = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def error(self) -> StudyError:
        """Why the task did not finish: its first error message, or else its last line."""
        output = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        reason = "without any output"
        for line in output.splitlines():
            if line.startswith("error: "):
                reason = line.removeprefix("error: ")
                break
            reason = line
        code = self.popen.returncode
        return StudyError(
            f"{self.task.name} ended with exit code {code}: {reason} (all output: {self.log})",
            code or INTERNAL_FAULT,
        )
