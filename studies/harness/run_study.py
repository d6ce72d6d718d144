"""Runs a study on this machine: its pending tasks as processes, several at a time, until none is left.

Each task is a call of the script that makes any run. Finished runs are skipped, others resume from their checkpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from pipeline import log
from pipeline.errors import INTERNAL_FAULT, RESUME_LATER, StudyError
from pipeline.files import shipped
from pipeline.hub import model_folder
from studies.harness.random_base import make_random_base
from studies.harness.runs import StudyRuns, Task
from studies.harness.study import SCRATCH, load_study

LOG = "log.txt"
_POLL_EVERY_S = 0.2
_logger = log.get_logger(__name__)


def open_study(path: Path, data: Path) -> StudyRuns:
    """The runs of the study that the YAML file at `path` describes. A base with random weights is made first.

    Raises:
        ConfigError: the file describes no study, or one of its runs is not possible.
        DataError, BaseModelError: a text is missing, or the base cannot be made.
    """
    study = load_study(path, data)
    if study.base is not None:
        study = study.model_copy(update={"base": model_folder(study.base)})
    runs = StudyRuns(study, str(path))
    if study.scratch is not None:
        make_random_base(study.scratch, study.folder / SCRATCH)
    runs.check()
    return runs


def run_study(runs: StudyRuns, jobs: int) -> None:
    """Runs everything that is pending, at most `jobs` processes at a time.

    A run that fails is not tried again, and the others go on. Where this is ended early, those that run are stopped:
    they save, and resume the next time.

    Raises:
        StudyError: a run failed, other than by diverging at one of several learning rates.
        KeyboardInterrupt, SystemExit: a signal asked this process to end.
    """
    tasks = runs.pending_tasks()
    _logger.info("%s: %s; %d at a time", runs.study.folder, runs.progress(), jobs)
    running: list[_Process] = []
    failed: dict[str, StudyError] = {}
    signals: list[
        int
    ] = []  # acted on below, so that no process is lost between its start and its place in the list
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {
        number: signal.signal(number, lambda found, _: signals.append(found)) for number in numbers
    }
    try:
        while not signals:
            started = {process.task.name for process in running} | failed.keys()
            waiting = [task for task in tasks if task.name not in started]
            if not waiting and not running:
                break
            for task in waiting[: jobs - len(running)]:
                running.append(
                    _Process(task, side_by_side=min(jobs, len(tasks)))
                )  # a single task gets all cores
            time.sleep(_POLL_EVERY_S)
            ended = [process for process in running if process.popen.poll() is not None]
            running = [process for process in running if process not in ended]
            tasks = runs.pending_tasks() if ended else tasks
            for process in ended:
                name = process.task.name
                if name in {task.name for task in tasks}:
                    failed[name] = process.error()
                outcome = (
                    "failed"
                    if name in failed
                    else "diverged"
                    if process.popen.returncode
                    else "done"
                )
                took = timedelta(seconds=round(time.monotonic() - process.started))
                _logger.info("%s: %s in %s; %s", name, outcome, took, runs.progress())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if running:
            _logger.info("stopping %d run(s), which save first", len(running))
        for process in running:
            process.popen.terminate()
        for process in running:
            process.popen.wait()
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(RESUME_LATER)
    if failed:
        first, *others = failed.values()
        also = f"; {len(others)} other(s) failed too: {', '.join([*failed][1:])}" if others else ""
        raise StudyError(f"{first}{also}", first.exit_code)


class _Process:
    """A running task. Its output is appended to the run's LOG."""

    def __init__(self, task: Task, side_by_side: int) -> None:
        self.task, self.started = task, time.monotonic()
        task.run.write()
        self.log = task.run.folder / LOG
        environment = {
            "OMP_NUM_THREADS": str(
                max(1, len(os.sched_getaffinity(0)) // (side_by_side * task.ranks))
            ),
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
            self._log_start = file.tell()
            # A session of its own: Ctrl-C is passed on once, by this process, and not by the terminal too.
            self.popen = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def error(self) -> StudyError:
        """Why the task did not finish: its first error message, or else its last line."""
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        said = [*errors, *reversed(lines), "without any output"][0]
        code = self.popen.returncode
        return StudyError(
            f"{self.task.name} ended with exit code {code}: {said} (all output: {self.log})",
            code or INTERNAL_FAULT,
        )
