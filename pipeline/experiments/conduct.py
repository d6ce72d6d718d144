"""A study from its description to its summary; what is done already is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

from pipeline import log
from pipeline.errors import FINISHED, INTERNAL_FAULT, RESUME_LATER, StudyError
from pipeline.evaluation.table import cell, over_seeds, readable, table
from pipeline.experiments.pending import Task, best_rate, due, finished_count, is_at_the_edge, outcomes, run_count
from pipeline.experiments.results import Outcome, Row, Tried, has_diverged, read_outcome, write_summary
from pipeline.experiments.study import SCRATCH, load_study
from pipeline.experiments.study_runs import StudyRuns, Trial, make_scratch
from pipeline.run_folder.metrics import Figures, mean
from pipeline.run_folder.status import RunStatus, read_status

# --- The tasks of a study on this machine, as processes side by side: each a call of the script that makes any run ---

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


# --- How far a study is: a bar on a terminal, now and then a line in a log ------------------------------------------

_EVERY_S = 30.0


class Progress(AbstractContextManager["Progress"]):
    """Shows how many of `total` runs are done, how far those at work are, and the time that is left."""

    def __init__(self, total: int, jobs: int) -> None:
        self._total, self._jobs = total, jobs
        self._typical_s: float | None = None
        self._last = time.monotonic()
        self._bar: Any = tqdm(total=total, unit="run", dynamic_ncols=True) if sys.stderr.isatty() else None

    def ended(self, done: int, ended: Sequence[Running]) -> None:
        """Tasks ended; `done` runs are finished now."""
        for one in ended:
            took_s = time.monotonic() - one.started
            if "convert" not in one.task.stages:  # what makes a base takes as long as it takes
                self._typical_s = took_s
            if self._bar is None:
                _logger.info("%d of %d runs done: %s in %s", done, self._total, one.task.name, _rounded(took_s))
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def tell(self, done: int, running: Sequence[Running]) -> None:
        """Shows what is at work, if it is time to."""
        now = time.monotonic()
        if now - self._last < (1.0 if self._bar is not None else _EVERY_S):
            return
        self._last = now
        statuses = [read_status(one.task.run.config.folder) for one in running]
        where = [f"{one.task.name} {_steps(status)}" for one, status in zip(running, statuses, strict=True)]
        left_s = time_left(
            [status.seconds_left for status in statuses], self._total - done - len(running), self._typical_s, self._jobs
        )
        end = f"about {_rounded(left_s)} left" if left_s is not None else "time left not known yet"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{', '.join(where)}; {end}")
        else:
            _logger.info("%d of %d runs done; %s; %s", done, self._total, ", ".join(where), end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def time_left(running_s: Sequence[float | None], waiting: int, typical_s: float | None, jobs: int) -> float | None:
    """Seconds until all is done, if `waiting` more runs of about `typical_s` follow those at work, `jobs` at a time."""
    guesses = [left if left is not None else typical_s for left in running_s]
    known = [guess for guess in guesses if guess is not None]
    if len(known) < len(guesses) or (waiting > 0 and typical_s is None):
        return None
    return max([(sum(known) + waiting * (typical_s or 0.0)) / jobs, *known])


def _steps(status: RunStatus) -> str:
    if not status.steps:
        return "starts"
    own = "" if status.seconds_left is None else f" ({_rounded(status.seconds_left)})"
    return f"{status.step}/{status.steps}{own}"


def _rounded(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


# --- The end of a study: summary.json, a row a method and seed, and what a person reads of it -----------------------

_ANSWERED = "first_token_accuracy"


@dataclass(frozen=True)
class Summary:
    """The rows of summary.json, and what came of each learning rate that was tried."""

    rows: list[Row]
    tried: list[Tried]

    def as_text(self) -> str:
        """The learning rates, and what was learned and forgotten, a row a method."""
        first = self.rows[0]
        header = ["", "trained", "learning rate", "seconds", "GiB"]
        for name in _texts(first):
            header += [f"{name}: perplexity", "before", "bits per byte"]
        for role in _asked(first):
            header += [f"{role}: first token", "before"]
        labels = dict.fromkeys(row.label for row in self.rows)
        lines = [_line([row for row in self.rows if row.label == label]) for label in labels]
        several = any(row.seed != first.seed for row in self.rows)
        note = "\n\n± is one standard deviation over seeds, as of a sample." if several else ""
        return f"{_rates(self.tried)}\n\n{table(header, lines)}{note}"


def summarise(runs: StudyRuns) -> Summary:
    """Reads all runs of a finished study, each once, and writes summary.json and learning_rates.json into its folder.

    Raises:
        RunFolderError: the figures of a run are gone or damaged.
    """
    study = runs.study
    rows: list[Row] = []
    tried: list[Tried] = []
    for name, compared in study.methods.items():
        found = outcomes(runs, name)
        rate = best_rate(found)
        for seed in study.seeds:
            trial = Trial(name, rate, seed)
            outcome = found.get(trial) or read_outcome(runs.trial(trial))
            rows.append(outcome.row(trial, compared.label, study.folder))
        at_the_edge = is_at_the_edge(rate, compared.learning_rates)
        tried += [
            _tried(trial, outcome, compared.label, chosen=trial.learning_rate == rate, at_the_edge=at_the_edge)
            for trial, outcome in found.items()
        ]
    write_summary(study.folder, rows, tried)
    return Summary(rows, tried)


def _tried(trial: Trial, outcome: Outcome | None, label: str, *, chosen: bool, at_the_edge: bool) -> Tried:
    new, replay = (outcome.perplexity(role, outcome.after) if outcome else None for role in ("new", "replay"))
    return Tried(
        label=label,
        learning_rate=trial.learning_rate,
        seed=trial.seed,
        new_perplexity=new,
        replay_perplexity=replay,
        after=outcome.after if outcome else {},
        chosen=chosen,
        at_the_edge=chosen and at_the_edge,
    )


def _rates(tried: Sequence[Tried]) -> str:
    rows = []
    for one in tried:
        after = [readable(value) if value is not None else "" for value in (one.new_perplexity, one.replay_perplexity)]
        mark = "chosen, at the edge" if one.at_the_edge else "chosen" if one.chosen else ""
        rows.append([one.label, f"{one.learning_rate:g}", *after, "diverged" if one.diverged else mark])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], rows)


def _line(rows: Sequence[Row]) -> list[str]:
    """One method over all its seeds: means, and the spread of what it ended with."""
    first = rows[0]
    seconds = [one.seconds for one in rows if one.seconds is not None]
    memory = [one.peak_memory_gib for one in rows if one.peak_memory_gib is not None]
    cells = [
        first.label,
        cell(first.trainable_parameters, ","),
        cell(first.learning_rate, "g"),
        cell(mean(seconds) if seconds else None, ".0f"),
        cell(max(memory, default=None), ".2f"),
    ]
    for name in _texts(first):
        after = [one.after[name]["perplexity"] for one in rows]
        bits = mean([one.after[name]["bits_per_byte"] for one in rows])
        cells += [over_seeds(after, readable), readable(first.before[name]["perplexity"]), f"{bits:.3f}"]
    for names in _asked(first).values():
        before, after = ([_known(row.before, names) for row in rows], [_known(row.after, names) for row in rows])
        cells += [over_seeds(after, "{:.1%}".format), f"{mean(before):.1%}"]
    return cells


def _texts(row: Row) -> list[str]:
    """The corpora with a held-out part that asks nothing."""
    return [name for name in row.roles if name in row.after and _ANSWERED not in row.after[name]]


def _asked(row: Row) -> dict[str, list[str]]:
    """The corpora of questions and answers, by their role: one mean stands for those of a role."""
    roles: dict[str, list[str]] = {}
    for name, role in row.roles.items():
        if _ANSWERED in row.after.get(name, {}):
            roles.setdefault(role, []).append(name)
    return roles


def _known(figures: Figures, names: Sequence[str]) -> float:
    return mean([figures[name][_ANSWERED] for name in names])


# --- A study from its description to its summary; what is done al ---


def open_study(path: Path, data: Path) -> StudyRuns:
    """The runs of the study that the YAML file at `path` describes, with its base made where that is from nothing.

    Raises:
        ConfigError: it does not describe a study, or one of its runs could not be.
        DataError, BaseModelError: the base cannot be made.
    """
    study = load_study(path, data)
    runs = StudyRuns(study, str(path))
    if study.scratch is not None:
        make_scratch(study.scratch, study.folder / SCRATCH)
    runs.check_fits_base()
    return runs


def conduct(runs: StudyRuns, jobs: int) -> None:
    """Does all that is due, `jobs` runs side by side on this machine.

    Raises:
        StudyError: a run ended in a fault, other than to diverge at one of several learning rates; those beside it
            were stopped and saved.
    """
    tasks, done, total = due(runs), finished_count(runs), run_count(runs)
    _logger.info("%s: %d of %d runs are done; %d at a time", runs.study.folder, done, total, jobs)
    with SideBySide(jobs) as hands, Progress(total, jobs) as progress:
        while tasks:
            hands.start(tasks)
            if ended := hands.look():
                for one in ended:
                    if not has_diverged(one.task.run):
                        one.check()
                tasks, done = due(runs), finished_count(runs)
                progress.ended(done, ended)
                _check_over(ended, tasks)
            progress.tell(done, hands.running)


def _check_over(ended: Sequence[Running], tasks: Sequence[Task]) -> None:
    """Raises StudyError where one of `ended` is still among the `tasks` that are due."""
    due_still = {task.name for task in tasks}
    for one in ended:
        if one.task.name in due_still:
            one.check()  # it diverged, and there is no other learning rate
            raise StudyError(f"{one.task.name} ended well, and is still to be done", INTERNAL_FAULT)
        if one.process.returncode:
            _logger.info("%s diverged: that learning rate is out", one.task.name)
