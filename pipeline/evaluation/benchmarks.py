"""Benchmarks by lm-eval, an optional package: its tasks on Hugging Face folders or on a model in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.chats import ChatTemplate
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.vocabulary import exported_spelling
from pipeline.errors import ConfigError, DataError, MissingPackageError, faults_of_library, in_one_line
from pipeline.evaluation.perplexity import Prefix, prefix_of
from pipeline.evaluation.table import table
from pipeline.model.output import NEVER

AVERAGE = "average"
_FEW_SHOT_SEED = 1234  # lm-eval's default


@dataclass(frozen=True)
class Tasks:
    """lm-eval's tasks as `TaskManager.load` gives them, the names asked for, and how many documents of each to take."""

    names: Sequence[str]
    loaded: Mapping[str, Any]
    limit: int | None


@dataclass(frozen=True)
class Result:
    """A model on a task by one metric, over `documents` documents. `stderr` is None if lm-eval gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int


def load_tasks(
    names: Sequence[str], *, include: Path | None = None, few_shot: int | None = None, limit: int | None = None
) -> Tasks:
    """lm-eval's tasks and groups `names`, whose data sets it downloads from the Hub, or has in its cache.

    `include` is a folder of further tasks in lm-eval's format, whose Python code is run. `few_shot` is the number of
    solved examples before each question: None takes the task's own number, and BLiMP never has any. `limit` takes the
    first documents of each task.

    Raises:
        MissingPackageError: lm-eval is not installed, or too old.
        ConfigError: lm-eval has no such task.
        DataError: the documents of a task are missing.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about settings that are intended
    try:
        import datasets
        from lm_eval.api.group import Group  # noqa: F401  # which earlier versions lack
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingPackageError(
            f"lm-eval: 0.4.13 or newer is needed ({error}); pip install 'scale-cpt[eval]'"
        ) from None
    if include is not None and not any(include.rglob("*.yaml")):
        raise DataError(f"{include}: expected a folder with lm-eval's task files (*.yaml), found none")
    datasets.disable_progress_bars()
    with faults_of_library(f"--tasks {' '.join(names)}", ConfigError):
        manager = TaskManager(include_path=include and str(include), include_defaults=include is None)
        if include is not None and not set(names) <= manager.task_index.keys():
            manager = TaskManager(include_path=str(include))  # listing lm-eval's own 14,000 files takes ten seconds
        if unknown := [name for name in names if name not in manager.task_index]:
            raise ConfigError(f"--tasks {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` lists them")
        try:
            loaded = dict(manager.load(list(names)))
        except OSError as error:
            fault = f"{' '.join(names)}: its documents cannot be read ({in_one_line(error):.200})"
            raise DataError(f"{fault}; download them where there is a network, with the same HF_HOME") from None
    for name, task in loaded["tasks"].items():  # as lm-eval's own command line sets it
        own = task.get_config("num_fewshot")
        wanted = own if own == 0 or few_shot is None else few_shot
        if wanted and not (task.has_training_docs() or task.has_validation_docs()):
            raise DataError(f"{name}: --few-shot needs a train or validation split other than the one it is scored on")
        task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    return Tasks(names, loaded, limit)


def run_benchmarks(
    folder: Path,
    tasks: Tasks,
    *,
    batch_size: int = 16,
    prefix: Prefix = "document",
    chat_template: bool = False,
    trust_remote_code: bool = False,
) -> list[Result]:
    """Scores the model in `folder` on `tasks`, on a GPU if there is one.

    If `tasks` name several, the last result is the mean of their accuracies. Every prompt follows `prefix`, as
    documents do in training; or with `chat_template` it is a user's message, framed by the tokenizer's chat template.

    Raises:
        DataError: the folder has no tokenizer.
        BaseModelError: the folder holds no model that can be loaded.
    """
    if chat_template:
        ChatTemplate(folder)  # there is one
        prefix = "none"  # a template writes all that it needs
    from lm_eval.evaluator import evaluate

    model = _hf_model(folder, batch_size, prefix, trust_remote_code=trust_remote_code)
    settings = {"limit": tasks.limit, "log_samples": False}
    settings |= {"apply_chat_template": chat_template, "fewshot_as_multiturn": chat_template}
    found = evaluate(model, dict(tasks.loaded), **settings)["results"]
    results = []
    for name in dict.fromkeys([*tasks.names, *tasks.loaded["tasks"]]):
        values = found.get(name, {})  # a tag has none of its own
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{filtered}")
                error = float(stderr) if isinstance(stderr, (int, float)) else None
                results.append(Result(name, metric, float(value), error, int(values["sample_len"])))
    accuracies = [result for result in results if result.task in tasks.names and result.metric == "acc"]
    if len(accuracies) > 1:
        mean = fmean(result.value for result in accuracies)
        results.append(Result(AVERAGE, "acc", mean, None, sum(result.documents for result in accuracies)))
    return results


def comparison(results: Mapping[str, Sequence[Result]]) -> str:
    """A table of several models' results, by the model's name, each with its standard error if there is one."""
    rows = []
    for row in zip(*results.values(), strict=True):
        cells = [row[0].task, row[0].metric, f"{row[0].documents:,}"]
        for result in row:
            cells += [f"{result.value:.4f}", "" if result.stderr is None else f"± {result.stderr:.4f}"]
        rows.append(cells)
    return table(["task", "metric", "n", *(cell for name in results for cell in (name, ""))], rows)


def _hf_model(folder: Path, batch_size: int, prefix: Prefix, *, trust_remote_code: bool) -> Any:  # noqa: ANN401
    """lm-eval's own model of a Hugging Face folder, whose tokenizer puts `prefix` before every prompt."""
    from lm_eval.models.huggingface import HFLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    with faults_of_library(f"{folder}: transformers cannot load its tokenizer", DataError):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    read = prefix_of(load_tokenizer(folder), prefix)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: Python code, which knows its own prefix
    if backend is not None:
        names = [(backend.id_to_token(token), token) for token in read]
        backend.post_processor = TemplateProcessing(single=[*(name for name, _ in names), "$A"], special_tokens=names)
    last = read[-1] if read else None
    scored = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, prefix_token_id=last)
    if spelling := exported_spelling(folder):
        scored._loglikelihood_tokens = partial(_score_as_possible, scored._loglikelihood_tokens, spelling)
    return scored


def _score_as_possible(
    score: Callable[..., list[tuple[float, bool]]],
    spelling: Mapping[int, Sequence[int]],
    requests: Sequence[tuple[Any, list[int], list[int]]],
    **options: Any,  # noqa: ANN401
) -> list[tuple[float, bool]]:
    """lm-eval's scores of (names, context, continuation), where a continuation may be impossible after a closed token.

    Its first new pieces, as few as it takes, are then the old ones that they stand for.
    """
    results = score(requests, **options)
    left, spelled_out = [place for place, found in enumerate(results) if found[0] < NEVER / 2], 1
    while left:
        again = []
        for place in left:
            names, context, ids = requests[place]
            new = [at for at, id_ in enumerate(ids) if id_ in spelling][:spelled_out]
            again.append(
                (names, context, [old for at, id_ in enumerate(ids) for old in (spelling[id_] if at in new else [id_])])
            )
        for place, found in zip(left, score(again, **options), strict=True):
            results[place] = found
        more = [place for place in left if sum(id_ in spelling for id_ in requests[place][2]) > spelled_out]
        left, spelled_out = [place for place in more if results[place][0] < NEVER / 2], 2 * spelled_out
    return results
