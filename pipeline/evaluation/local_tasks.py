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

from pipeline.data.readers import lines
from pipeline.data.text_streams import open_stream, text_length
from pipeline.errors import ConfigError, DataError

_FAMILIES = ("kobest", "arc", "blimp")
_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".jsonl.xz")
_SPLITS = ("training_split", "validation_split", "test_split")


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
    files_of = {name: entry.yaml_path for name, entry in manager.task_index.items() if entry.yaml_path is not None}
    tasks: dict[str, ConfigurableTask] = {}
    groups: dict[str, Group] = {}

    def config_of(name: str) -> dict[str, Any]:
        return dict(load_yaml(files_of[name], resolve_func=True))

    for name in names:
        if name not in files_of:
            known = [task for task in files_of if not task.startswith("blimp_")]
            raise ConfigError(
                f"--tasks {name}: cannot be read from local files; expected one of {', '.join(known)}, blimp_<paradigm>"
            )
        config = config_of(name)
        if isinstance(config["task"], str):
            tasks.setdefault(name, _local_task(config, name, data))
            continue
        configs = {member: config_of(member) for member in config["task"]}
        members = {member: own for member, own in configs.items() if _files(own, member, data)}
        if not members:
            raise DataError(
                f"{data / name}: no file for any task of {name}; docs/evaluation.md says where files belong"
            )
        groups[name] = Group.from_config(GroupConfig(**{**config, "task": list(members)}))
        for member, own in members.items():
            groups[name].add(tasks.setdefault(member, _local_task(own, member, data)))
    return {"tasks": tasks, "groups": groups, "group_map": {name: group.child_names for name, group in groups.items()}}


def _local_task(config: dict[str, Any], task: str, data: Path) -> ConfigurableTask:
    """The task as lm-eval's file describes it, on local documents and without metrics that would be downloaded."""
    files = _files(config, task, data)
    scored = config.get("test_split") or config["validation_split"]
    if scored not in files:
        raise DataError(f"{_split_path(data, task, scored)}.jsonl: no such file; {task} is scored on it")
    documents = {split: datasets.Dataset.from_list(_records(path)) for split, path in files.items()}
    local = {key: value for key, value in config.items() if key not in ("tag", "dataset_path", "dataset_name")}
    local |= {key: config.get(key) if config.get(key) in files else None for key in _SPLITS}
    # lm-eval computes these metrics itself; it would download the Hub's metric of the same name and not use it.
    local["metric_list"] = [
        {key: value for key, value in metric.items() if key != "hf_evaluate"} for metric in config["metric_list"]
    ]
    try:
        return ConfigurableTask(config={**local, "custom_dataset": lambda **_: documents})
    except (KeyError, UndefinedError) as error:
        raise DataError(f"{files[scored]}: not the documents of lm-eval's {task}: {error}") from None


def _files(config: Mapping[str, Any], task: str, data: Path) -> dict[str, Path]:
    """The file of each split of a task that has one."""
    splits = filter(None, map(config.get, _SPLITS))
    paths = ((split, Path(f"{_split_path(data, task, split)}{suffix}")) for split in splits for suffix in _SUFFIXES)
    return {split: path for split, path in paths if path.is_file()}


def _split_path(data: Path, task: str, split: str) -> Path:
    """The path of a task's split, without its suffix."""
    family, _, rest = task.partition("_")
    if family == "blimp":
        return data / family / rest
    return data / family / rest / split if family == "kobest" else data / task / split


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(lines(open_stream(path), 0, text_length(path)), start=1):
        try:
            records.append(dict(orjson.loads(line.content)))
        except (ValueError, TypeError):
            raise DataError(f"{path}: line {number}: expected a JSON object; copy the file again") from None
    if not records:
        raise DataError(f"{path}: holds no document")
    return records
