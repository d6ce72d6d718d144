"""Runs a study on this machine: its pending tasks as processes, several at a time, until none is left.

Each task is a call of the script that makes any run. Finished runs are skipped, others resume from their checkpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

from pipeline import log
from pipeline.errors import FINISHED, INTERNAL_FAULT, RESUME_LATER, StudyError
from pipeline.files import shipped
from pipeline.hub import model_folder
from pipeline.run_folder.status import read_status
from pipeline.studies.pending import Task, finished_count, pending_tasks, run_count
from pipeline.studies.random_base import make_random_base
from pipeline.studies.results import has_diverged
from pipeline.studies.study import SCRATCH, load_study
from pipeline.studies.study_runs import StudyRuns

LOG = "log.txt"
_SCRIPT = shipped() / "slurm" / "cpt_korean.sh"
_POLL_EVERY_S = 0.2
_logger = log.get_logger(__name__)


def open_study(path: Path, data: Path) -> StudyRuns:
    """The runs of the study that the YAML file at `path` describes. A base with random weights is made first.

    Raises:
        ConfigError: the file describes no study, or one of its runs is not possible.
        DataError: a text is missing.
        DataError, BaseModelError: the base cannot be made.
    """
    study = load_study(path, data)
    if study.base is not None:
        study = study.model_copy(update={"base": model_folder(study.base)})
    runs = StudyRuns(study, str(path))
    if study.scratch is not None:
        make_random_base(study.scratch, study.folder / SCRATCH)
    runs.check_fits_base()
    runs.check_inputs()
    return runs


def run_study(runs: StudyRuns, jobs: int) -> None:
    """Runs everything that is pending, at most `jobs` processes at a time.

    Raises:
        StudyError: a run failed, other than by diverging at one of several learning rates; the other runs were
            stopped and saved.
    """
    tasks, done, total = pending_tasks(runs), finished_count(runs), run_count(runs)
    _logger.info("%s: %d of %d runs are done; %d at a time", runs.study.folder, done, total, jobs)
    with Processes(jobs) as processes, log.progress_bar(str(runs.study.folder), total, " runs") as bar:
        bar.initial = bar.n = done
        bar.unit_scale = False  # 7 runs, not 7.00
        bar.miniters = 0  # so that `update(0)` shows the new steps
        while tasks:
            processes.start(tasks)
            if ended := processes.poll():
                for process in ended:
                    if not has_diverged(process.task.run):
                        process.check()
                tasks, done = pending_tasks(runs), finished_count(runs)
                _check_over(ended, tasks)
                for process in ended:
                    took = timedelta(seconds=round(time.monotonic() - process.started))
                    how = "done" if process.popen.returncode == FINISHED else "diverged, this learning rate is out"
                    _logger.info("%s: %s in %s; %d of %d runs are done", process.task.name, how, took, done, total)
            bar.set_postfix_str(", ".join(map(_step_of, processes.running)), refresh=False)
            bar.update(done - bar.n)


@dataclass
class Process:
    """A running task. Its output is appended to `log`, from the offset `log_start` in bytes."""

    task: Task
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int
    started: float

    def check(self) -> None:
        """Raises StudyError, with the task's own error message, where it failed."""
        code = self.popen.returncode
        if code == FINISHED:
            return
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").splitlines()
        error = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
        error = error or (lines[-1] if lines else "without any output")
        raise StudyError(f"{self.task.name} ended with exit code {code}: {error} (all output: {self.log})", code)


class Processes:
    """At most `jobs` running tasks. Leaving the block stops them; they save, and resume the next time."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.running: list[Process] = []
        self._signal: int | None = None

    def __enter__(self) -> Processes:
        # `poll` acts on it, so that no process is lost between its start and its place in the list.
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.running:
            _logger.info("stopping %d run(s), which save first", len(self.running))
        for process in self.running:
            process.popen.terminate()
        for process in self.running:
            process.popen.wait()

    def start(self, tasks: Sequence[Task]) -> None:
        """Starts as many of `tasks` as there is room for, except those that run already."""
        names = {process.task.name for process in self.running}
        new = [task for task in tasks if task.name not in names]
        for task in new[: self.jobs - len(self.running)]:
            # A single task gets all cores.
            self.running.append(_start(task, side_by_side=min(self.jobs, len(tasks))))

    def poll(self) -> list[Process]:
        """Waits for a moment; returns the processes that ended since the last call.

        Raises:
            KeyboardInterrupt, SystemExit: a signal asked this process to end.
        """
        time.sleep(_POLL_EVERY_S)
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(RESUME_LATER)
        ended = [process for process in self.running if process.popen.poll() is not None]
        self.running = [process for process in self.running if process not in ended]
        return ended

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _start(task: Task, side_by_side: int) -> Process:
    task.run.write()
    path = task.run.config.folder / LOG
    environment = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // (side_by_side * task.ranks))),
        **os.environ,
        # The script takes the first python on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PROJECT": str(Path.cwd()),
        "CONFIG": str(task.run.path),
        "STAGES": " ".join(task.stages),
        "NPROC": str(task.ranks),
    }
    with path.open("ab") as file:
        log_start = file.tell()
        # A session of its own: Ctrl-C is passed on once, by this process, and not by the terminal too.
        popen = subprocess.Popen(
            ["bash", str(_SCRIPT)], env=environment, stdout=file, stderr=file, start_new_session=True
        )
    return Process(task, popen, path, log_start, time.monotonic())


def _check_over(ended: Sequence[Process], pending: Sequence[Task]) -> None:
    """Raises StudyError where one of `ended` is still `pending`."""
    names = {task.name for task in pending}
    for process in ended:
        if process.task.name in names:
            process.check()  # it diverged, and there is no other learning rate
            raise StudyError(f"{process.task.name} ended without an error, but is not finished", INTERNAL_FAULT)


def _step_of(process: Process) -> str:
    status = read_status(process.task.run.config.folder)
    return f"{process.task.name} {f'{status.step}/{status.steps}' if status.steps else 'starts'}"
