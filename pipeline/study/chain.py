"""A study as a chain of jobs: whether it goes on, once the jobs of some tasks have ended."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.errors import StudyError
from pipeline.exit_codes import USER_ERROR
from pipeline.run_folder.status import read_status
from pipeline.study.due import Task, due
from pipeline.study.runs import StudyRuns


def due_after(runs: StudyRuns, ended: Collection[str]) -> list[Task]:
    """What can be done now that the jobs of the tasks with the names `ended` are over.

    None is submitted a second time, whatever ended its job: a fault, `scancel`, a lost node. A run that diverged at one
    of several learning rates is not due.

    Raises:
        StudyError: some of `ended` are due still.
        RunFolderError: somebody removed the folder of one.
    """
    tasks = due(runs)
    left = [task for task in tasks if task.name in ended]
    if not left:
        return tasks
    first, *others = left
    status = read_status(first.run.config.folder)
    also = f" (nor are {', '.join(task.name for task in others)})" if others else ""
    raise StudyError(
        f"{first.name}: its job is over, and it is not done{also}; the run is {status.state}: {status.why}; "
        "the output of its job says more; submitted again, the study goes on with what is left",
        USER_ERROR,
    )
