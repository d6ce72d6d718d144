"""Benchmarks by lm-eval: its tasks on Hugging Face folders, zero-shot unless asked otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from pipeline.conversion.hf_model import load_hf_model
from pipeline.errors import ConfigError, DataError, MissingPackageError
from pipeline.evaluation.table import table

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
        from pipeline.evaluation.local_tasks import load_local_tasks

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
