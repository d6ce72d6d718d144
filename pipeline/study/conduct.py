"""A study from its description to its summary; what is done already is not done again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline import log
from pipeline.errors import StudyError
from pipeline.exit_codes import INTERNAL_FAULT
from pipeline.study.description import SCRATCH, load_study
from pipeline.study.due import Task, due, finished_count, run_count
from pipeline.study.processes import Running, SideBySide
from pipeline.study.progress import Progress
from pipeline.study.results import has_diverged
from pipeline.study.runs import StudyRuns
from pipeline.study.scratch import make_scratch

_logger = log.get_logger(__name__)


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
