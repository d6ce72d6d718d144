"""A study from its description to its summary; what is done already is not done again."""

from __future__ import annotations

from pathlib import Path

from pipeline import log
from pipeline.errors import StudyError
from pipeline.exit_codes import INTERNAL_FAULT
from pipeline.study.description import SCRATCH, load_study
from pipeline.study.due import due, finished_count, run_count
from pipeline.study.processes import SideBySide
from pipeline.study.progress import Progress
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
    return runs


def conduct(runs: StudyRuns, jobs: int) -> None:
    """Does all that is due, `jobs` runs side by side on this machine.

    Raises:
        StudyError: a run ended in a fault; those beside it were stopped and saved.
    """
    tasks, done, total = due(runs), finished_count(runs), run_count(runs)
    _logger.info("%s: %d of %d runs are done; %d at a time", runs.study.folder, done, total, jobs)
    with SideBySide(jobs) as hands, Progress(total, jobs) as progress:
        while tasks:
            hands.start(tasks)
            if ended := hands.look():
                tasks, done = due(runs), finished_count(runs)
                progress.ended(done, ended)
                if again := {one.task.name for one in ended} & {task.name for task in tasks}:
                    raise StudyError(f"{again.pop()} ended well, and is still to be done", INTERNAL_FAULT)
            progress.tell(done, hands.running)
