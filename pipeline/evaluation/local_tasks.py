"""lm-eval's own tasks with their documents taken from local files, so that nothing is downloaded.

A task's prompt, choices, target and metrics are those of the installed lm-eval, so results compare with published ones
if the files hold the same documents. The files, all below one folder, may be compressed (.gz, .zst, .xz):

    kobest_boolq     kobest/boolq/test.jsonl, validation.jsonl, train.jsonl
    arc_easy         arc_easy/test.jsonl, ...
    blimp_passive_1  blimp/passive_1.jsonl

A group, `kobest` or `blimp`, stands for those of its tasks that have a file.
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
from pipeline.data.readers import lines
from pipeline.data.text_streams import open_stream, text_length
from pipeline.errors import ConfigError, DataError

_FAMILIES = ("kobest", "arc", "blimp")
_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".jsonl.xz")
_SPLITS = ("training_split", "validation_split", "test_split")
_logger = log.get_logger(__name__)


def load_local_tasks(names: Sequence[str], data: Path) -> dict[str, Any]:
    """The tasks and groups `names`, on the files below `data`, in the form of lm-eval's `TaskManager.load`.

    Raises:
        ConfigError: a name is not one of lm-eval's in the families that can be read from local files.
        DataError: the documents that a task is scored on are missing or damaged, or lack a field.
    """
    datasets.disable_progress_bars()
    # Listing all of lm-eval's 14,000 files takes ten seconds.
    task_folder = Path(lm_eval.tasks.__file__).parent
    manager = TaskManager(include_defaults=False, include_path=[task_folder / family for family in _FAMILIES])
    tasks: dict[str, ConfigurableTask] = {}
    groups: dict[str, Group] = {}
    for name in names:
        if name not in manager.task_index:
            known = [task for task in manager.all_groups + manager.all_subtasks if not task.startswith("blimp_")]
            raise ConfigError(
                f"--tasks {name}: cannot be read from local files; expected one of {', '.join(known)}, blimp_<paradigm>"
            )
        members = _members(manager, name, data)
        for member in members:
            if member not in tasks:
                tasks[member] = _load_local_task(manager, member, data)
        if members != [name]:
            groups[name] = Group.from_config(GroupConfig(**{**_yaml(manager, name), "task": members}))
            for member in members:
                groups[name].add(tasks[member])
    return {"tasks": tasks, "groups": groups, "group_map": {name: group.child_names for name, group in groups.items()}}


def _yaml(manager: TaskManager, name: str) -> dict[str, Any]:
    return dict(load_yaml(manager.task_index[name].yaml_path, resolve_func=True))


def _members(manager: TaskManager, name: str, data: Path) -> list[str]:
    """The tasks that `name` stands for: itself, or those of a group or tag that have files."""
    entry = manager.task_index[name]
    all_members: Sequence[str] = sorted(entry.tags) if entry.yaml_path is None else _yaml(manager, name)["task"]
    if isinstance(all_members, str):
        return [name]
    members = [member for member in all_members if _files(_yaml(manager, member), member, data)]
    if not members:
        raise DataError(f"{data / name}: no file for any task of {name}; docs/evaluation.md says where files belong")
    _logger.info("%s: %d of its %d tasks have a file below %s", name, len(members), len(all_members), data)
    return members


def _split_path(task: str, split: str) -> Path:
    """The path of a task's split below the data folder, without its suffix."""
    family, _, rest = task.partition("_")
    if family == "blimp":
        return Path(family, rest)
    return Path(family, rest, split) if family == "kobest" else Path(task, split)


def _files(config: Mapping[str, Any], task: str, data: Path) -> dict[str, Path]:
    """The file of each split of a task that has one."""
    found: dict[str, Path] = {}
    for split in filter(None, map(config.get, _SPLITS)):
        for suffix in _SUFFIXES:
            if (path := Path(f"{data / _split_path(task, split)}{suffix}")).is_file():
                found[split] = path
    return found


def _load_local_task(manager: TaskManager, task: str, data: Path) -> ConfigurableTask:
    """The task as lm-eval's file describes it, on local documents and without metrics that would be downloaded."""
    config = _yaml(manager, task)
    for key in ("tag", "dataset_path", "dataset_name"):
        config.pop(key, None)
    # lm-eval computes these metrics itself; it would download the Hub's metric of the same name and not use it.
    config["metric_list"] = [
        {key: value for key, value in metric.items() if key != "hf_evaluate"} for metric in config["metric_list"]
    ]
    files = _files(config, task, data)
    scored = config.get("test_split") or config["validation_split"]
    if scored not in files:
        raise DataError(f"{data / _split_path(task, scored)}.jsonl: no such file; {task} is scored on it")
    for key in _SPLITS:
        if config.get(key) not in files:
            config[key] = None
    documents = {split: datasets.Dataset.from_list(_records(path)) for split, path in files.items()}
    config["custom_dataset"] = lambda **_: documents
    try:
        return ConfigurableTask(config=config)
    except (KeyError, UndefinedError) as error:
        raise DataError(f"{files[scored]}: not the documents of lm-eval's {task}: {error}") from None


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(lines(open_stream(path), 0, text_length(path)), start=1):
        try:
            record = orjson.loads(line.content)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); copy the file again") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number}: expected a JSON object, found {type(record).__name__}")
        records.append(record)
    if not records:
        raise DataError(f"{path}: holds no document")
    return records
