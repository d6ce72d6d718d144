"""lm-eval's own tasks with their documents taken from local files, so that no network is asked for anything.

A task's prompt, choices, target and metrics are read from the installed lm-eval: figures compare with those that others
get by the task's name, as long as the files hold the same documents. What lies where, below one folder:

    kobest_boolq     kobest/boolq/test.jsonl, validation.jsonl, train.jsonl
    arc_easy         arc_easy/test.jsonl, ...
    blimp_passive_1  blimp/passive_1.jsonl

A group, `kobest` or `blimp`, is those of its tasks that have a file. Each file may be compressed (.gz, .zst, .xz).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import orjson
from jinja2 import UndefinedError
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import GroupConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from pipeline import log
from pipeline.data.streams import open_stream, text_length
from pipeline.errors import ConfigError, DataError

_FAMILIES = ("kobest", "arc", "blimp")
_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".jsonl.xz")
_SPLITS = ("training_split", "validation_split", "test_split")
_logger = log.get_logger(__name__)


def load_local_tasks(names: Sequence[str], data: Path) -> dict[str, Any]:
    """The tasks and groups `names`, on the files below `data`, in the form of `TaskManager.load`.

    Raises:
        ConfigError: a name is none of lm-eval's in the families that have a place for their files.
        DataError: the documents that a task is measured on are missing or damaged, or lack a field.
    """
    datasets.disable_progress_bars()
    manager = _manager()
    tasks: dict[str, ConfigurableTask] = {}
    groups: dict[str, Group] = {}
    for name in names:
        if name not in manager.task_index:
            named = [one for one in manager.all_groups + manager.all_subtasks if not one.startswith("blimp_")]
            known = ", ".join([*named, "blimp_<paradigm>"])
            raise ConfigError(f"--tasks {name}: no task with a place for local files; known are {known}")
        members = _members(manager, name, data)
        for member in members:
            tasks.setdefault(member, _load(task_config(manager, member), member, data))
        if members != [name]:
            groups[name] = Group.from_config(GroupConfig(**{**_yaml(manager, name), "task": members}))
            for member in members:
                groups[name].add(tasks[member])
    return {"tasks": tasks, "groups": groups, "group_map": {name: group.child_names for name, group in groups.items()}}


def task_config(manager: TaskManager, name: str) -> dict[str, Any]:
    """What lm-eval's file says of a task, but for where documents come from and metrics that would be downloaded."""
    config = _yaml(manager, name)
    # lm-eval computes these itself; it fetches the Hub's metric of the same name only to leave it unused.
    config["metric_list"] = [
        {key: value for key, value in metric.items() if key != "hf_evaluate"} for metric in config["metric_list"]
    ]
    for key in ("tag", "dataset_path", "dataset_name"):
        config.pop(key, None)
    return config


def _manager() -> TaskManager:
    """lm-eval's tasks of the families."""
    # All of lm-eval's fourteen thousand files take ten seconds to list.
    here = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_defaults=False, include_path=[here / family for family in _FAMILIES])


def _yaml(manager: TaskManager, name: str) -> dict[str, Any]:
    return dict(load_yaml(manager.task_index[name].yaml_path, resolve_func=True))


def _members(manager: TaskManager, name: str, data: Path) -> list[str]:
    """The tasks that `name` stands for: itself, or of a group or tag those with files."""
    entry = manager.task_index[name]
    all_members: Sequence[str] = sorted(entry.tags) if entry.yaml_path is None else _yaml(manager, name)["task"]
    if isinstance(all_members, str):
        return [name]
    members = [member for member in all_members if _files(_yaml(manager, member), member, data)]
    if not members:
        raise DataError(f"{data / name}: no file of any task of {name}; docs/evaluation.md says what lies where")
    _logger.info("%s: %d of its %d tasks have a file below %s", name, len(members), len(all_members), data)
    return members


def _place(task: str, split: str) -> Path:
    """Where a split of a task lies below the folder of all, but for the file's suffix."""
    family, _, rest = task.partition("_")
    if family == "blimp":
        return Path(family, rest)
    return Path(family, rest, split) if family == "kobest" else Path(task, split)


def _files(config: Mapping[str, Any], task: str, data: Path) -> dict[str, Path]:
    """The file of each split of a task that has one."""
    found: dict[str, Path] = {}
    for split in filter(None, map(config.get, _SPLITS)):
        for suffix in _SUFFIXES:
            if (path := Path(f"{data / _place(task, split)}{suffix}")).is_file():
                found[split] = path
    return found


def _load(config: dict[str, Any], task: str, data: Path) -> ConfigurableTask:
    files = _files(config, task, data)
    measured = config.get("test_split") or config["validation_split"]
    if measured not in files:
        raise DataError(f"{data / _place(task, measured)}.jsonl: no such file; {task} is measured on it")
    for key in _SPLITS:
        if config.get(key) not in files:
            config[key] = None
    documents = {split: datasets.Dataset.from_list(_records(path)) for split, path in files.items()}
    config["custom_dataset"] = lambda **_: documents
    try:
        return ConfigurableTask(config=config)
    except (KeyError, UndefinedError) as error:
        raise DataError(f"{files[measured]}: not the documents of lm-eval's {task}: {error}") from None


def _records(path: Path) -> list[dict[str, Any]]:
    content = open_stream(path).read_at(0, text_length(path))
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = orjson.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); copy the file again") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number}: expected a JSON object, found {type(record).__name__}")
        records.append(record)
    if not records:
        raise DataError(f"{path}: holds no document")
    return records
