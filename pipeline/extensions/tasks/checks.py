"""The check of `validation.tasks`, and the tasks that it has loaded."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pipeline.checks.inputs import RunInputs
from pipeline.extensions.tasks.benchmarks import Tasks
from pipeline.extensions.tasks.training_tasks import load_training_tasks

# Not a part of the inputs, which rank 0 broadcasts: lm-eval runs on rank 0 only.
_LOADED: WeakKeyDictionary[RunInputs, Tasks] = WeakKeyDictionary()


def check_tasks(inputs: RunInputs) -> None:
    """The tasks of `validation.tasks` exist, with their documents."""
    if inputs.config.validation.tasks:
        tasks_of(inputs)


def tasks_of(inputs: RunInputs) -> Tasks:
    """lm-eval's tasks of `validation.tasks`, with their documents, loaded once for these inputs.

    Raises:
        MissingPackageError: lm-eval is not installed.
        ConfigError: there is no such task, or the model in training cannot answer it.
        DataError: the documents of a task are missing.
    """
    if inputs not in _LOADED:
        _LOADED[inputs] = load_training_tasks(inputs.config)
    return _LOADED[inputs]
