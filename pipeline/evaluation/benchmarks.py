"""Benchmarks by lm-eval: its tasks on Hugging Face folders, zero-shot unless asked otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import lm_eval.tasks
import orjson
import torch
from jinja2 import UndefinedError
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import GroupConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoTokenizer

from pipeline import log
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.text_files import open_stream, text_length
from pipeline.errors import ConfigError, DataError, MissingPackageError
from pipeline.evaluation.table import table

# --- lm-eval's own tasks with their documents taken from local files, so that no network is asked for anything ------
# A task's prompt, choices, target and metrics are read from the installed lm-eval: figures compare with those that
# others get by the task's name, as long as the files hold the same documents. What lies where, below one folder:
#
#     kobest_boolq     kobest/boolq/test.jsonl, validation.jsonl, train.jsonl
#     arc_easy         arc_easy/test.jsonl, ...
#     blimp_passive_1  blimp/passive_1.jsonl
#
# A group, `kobest` or `blimp`, is those of its tasks that have a file. Each file may be compressed (.gz, .zst, .xz).

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
            tasks.setdefault(member, _load_documents(task_config(manager, member), member, data))
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


def _load_documents(config: dict[str, Any], task: str, data: Path) -> ConfigurableTask:
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


# --- Benchmarks by lm-eval: its tasks on Hugging Face folders, ze ---

AVERAGE = "average"
_OLDEST_LM_EVAL = (0, 4, 13)
_FEW_SHOT_SEED = 1234  # lm-eval's default


@dataclass(frozen=True)
class Result:
    """A model on a task by one measure. `stderr` is None where lm-eval gives none, `documents` how many were asked."""

    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int


def run_benchmarks(
    folder: Path,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    trust_remote_code: bool = False,
) -> list[Result]:
    """What the model in `folder` scores on lm-eval's `tasks`, on a GPU where there is one.

    With `data` every document comes from files below it (see `local_tasks`) and no network is asked for anything;
    without it lm-eval fetches each task's data set from the Hub. `few_shot` is the number of solved examples before
    each question; None is the task's own, none for those of `local_tasks`, and BLiMP never has any. `limit` takes the
    first documents of each task. Where `tasks` names several, the last result is the mean of their accuracies.

    Raises:
        MissingPackageError: lm-eval is not installed, or too old.
        ConfigError: lm-eval knows no such task, or `few_shot`, `limit` or `batch_size` cannot be.
        DataError: the documents of a task cannot be had, or the folder has no tokenizer.
        BaseModelError: the folder holds no model that can be loaded.
    """
    for flag, given, least in (("few-shot", few_shot, 0), ("limit", limit, 1), ("batch-size", batch_size, 1)):
        if given is not None and given < least:
            raise ConfigError(f"--{flag}: expected at least {least}, found {given}")
    lm_eval_version()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every setting that is as its caller wants it
    from lm_eval.evaluator import evaluate  # an optional package

    loaded = _load(tasks, data)
    _set_few_shot(loaded["tasks"], few_shot)
    found = evaluate(
        _language_model(folder, batch_size, trust_remote_code=trust_remote_code), loaded, limit=limit, log_samples=False
    )
    results = _results(found, dict.fromkeys([*tasks, *loaded["tasks"]]))
    accuracies = [one.value for one in results if one.task in tasks and one.metric == "acc"]
    if len(accuracies) > 1:
        documents = sum(one.documents for one in results if one.task in tasks and one.metric == "acc")
        results.append(Result(AVERAGE, "acc", fmean(accuracies), None, documents))
    return results


def lm_eval_version() -> str:
    """The version of the installed lm-eval.

    Raises:
        MissingPackageError: there is none, or it is too old.
    """
    needed = "0.4.13 or newer is needed; pip install 'scale-cpt[eval]'"
    try:
        found = version("lm_eval")
    except PackageNotFoundError:
        raise MissingPackageError(f"lm-eval: not installed, {needed}") from None
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < _OLDEST_LM_EVAL:
        raise MissingPackageError(f"lm-eval: found {found}, {needed}")
    return found


def comparison(results: Mapping[str, Sequence[Result]]) -> str:
    """The results of several models side by side, with a standard error behind each where there is one."""
    rows = []
    for row in zip(*results.values(), strict=True):
        errors = ["" if one.stderr is None else f"± {one.stderr:.4f}" for one in row]
        values = [cell for one, error in zip(row, errors, strict=True) for cell in (f"{one.value:.4f}", error)]
        rows.append([row[0].task, row[0].metric, f"{row[0].documents:,}", *values])
    return table(["task", "metric", "n", *(cell for name in results for cell in (name, ""))], rows)


def _load(tasks: Sequence[str], data: Path | None) -> dict[str, Any]:
    """Tasks and groups by name, in the form of lm-eval's `TaskManager.load`."""
    if data is not None:
        return load_local_tasks(tasks, data)
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if unknown := [name for name in tasks if name not in manager.task_index]:
        raise ConfigError(f"--tasks {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` lists them")
    try:
        return dict(manager.load(list(tasks)))
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{' '.join(tasks)}: cannot be fetched ({reason}); give local files with --data") from None


def _set_few_shot(tasks: Mapping[str, Any], few_shot: int | None) -> None:
    """As lm-eval's own command line does it."""
    for name, task in tasks.items():
        own = task.get_config("num_fewshot")
        wanted = own if own == 0 or few_shot is None else few_shot
        if wanted and not (task.has_training_docs() or task.has_validation_docs()):
            raise DataError(f"{name}: --few-shot needs a train or validation part beside the one it is measured on")
        task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=_FEW_SHOT_SEED)


def _language_model(folder: Path, batch_size: int, *, trust_remote_code: bool) -> Any:  # noqa: ANN401
    from lm_eval.models.huggingface import HFLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder}: its tokenizer cannot be loaded by transformers: {reason}") from None
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)


def _results(found: Mapping[str, Any], names: Iterable[str]) -> list[Result]:
    """One result a task, or group, and metric."""
    results = []
    for name in names:
        figures = found["results"].get(name, {})  # a tag has none of its own
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr"):
                stderr = figures.get(f"{metric}_stderr,{filtered}")
                error = float(stderr) if isinstance(stderr, (int, float)) else None
                results.append(Result(name, metric, float(value), error, int(figures["sample_len"])))
    return results
