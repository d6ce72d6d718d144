"""The tasks of a study on this machine, as processes side by side: each a call of the script that makes any run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from pipeline import log
from pipeline.errors import StudyError
from pipeline.exit_codes import FINISHED, RESUME_LATER
from pipeline.study.due import Task

LOG = "log.txt"
_SCRIPT = Path(__file__).parents[2] / "slurm" / "cpt_korean.sh"
_LOOK_EVERY_S = 0.2
_logger = log.get_logger(__name__)


@dataclass
class Running:
    """A task at work; what it says goes to `log.txt` in its run's folder, from `log_start` on."""

    task: Task
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    started: float

    def check(self) -> None:
        """Raises StudyError where the task ended in a fault, with what it said of it."""
        if self.process.returncode == FINISHED:
            return
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").splitlines()
        said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
        said = said or (lines[-1] if lines else "it said nothing")
        code = self.process.returncode
        raise StudyError(f"{self.task.name} ended with exit code {code}: {said} ({self.log} has all)", code)


class SideBySide:
    """At most `jobs` tasks at a time. Leaving it stops those that are at work; they save, and go on the next time."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.running: list[Running] = []
        self._asked_to_end: int | None = None

    def __enter__(self) -> SideBySide:
        # Only noted, and heeded by `look`: no process may be forgotten between its start and its place in the list.
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._stop()

    def start(self, tasks: Sequence[Task]) -> None:
        """Starts as many of `tasks` as there is room for, but none that is at work."""
        at_work = {one.task.name for one in self.running}
        new = [task for task in tasks if task.name not in at_work]
        for task in new[: self.jobs - len(self.running)]:
            # One task alone has the whole machine.
            self.running.append(_start(task, side_by_side=min(self.jobs, len(tasks))))

    def look(self) -> list[Running]:
        """What ended since the last call, after a moment.

        Raises:
            KeyboardInterrupt, SystemExit: a signal asked for the end.
        """
        time.sleep(_LOOK_EVERY_S)
        if self._asked_to_end == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked_to_end is not None:
            raise SystemExit(RESUME_LATER)
        ended = [one for one in self.running if one.process.poll() is not None]
        self.running = [one for one in self.running if one not in ended]
        return ended

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = number

    def _stop(self) -> None:
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)
        if self.running:
            _logger.info("stopping %d run(s), which save first", len(self.running))
        for one in self.running:
            one.process.wait()


def _start(task: Task, side_by_side: int) -> Running:
    task.run.write()
    path = task.run.config.folder / LOG
    threads = max(1, len(os.sched_getaffinity(0)) // (side_by_side * task.ranks))
    environment = {
        "OMP_NUM_THREADS": str(threads),
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
        # A session of its own: Ctrl-C comes from here, once, and not from the terminal too.
        process = subprocess.Popen(
            ["bash", str(_SCRIPT)], env=environment, stdout=file, stderr=file, start_new_session=True
        )
        return Running(task, process, path, log_start, time.monotonic())
