"""Benchmarks by lm-eval, an optional package: its tasks on Hugging Face folders."""

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

from pipeline.data.tokenizer.chats import ChatTemplate
from pipeline.data.tokenizer.extension.vocabulary import exported_spelling
from pipeline.data.tokenizer.load import has_tokenizer_file, load_tokenizer
from pipeline.errors import ConfigError, DataError, MissingPackageError, faults_of_library
from pipeline.evaluation.batches import frequency_context
from pipeline.evaluation.perplexity import Prefix, windows
from pipeline.evaluation.table import table
from pipeline.evaluation.tokens import check_served_ids
from pipeline.hf.load import load_hf_model
from pipeline.hf.served_tokenizer import served_tokenizer, tokenizer_as_trained
from pipeline.log import progress_bar
from pipeline.scale_math import NEVER

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
    names: Sequence[str],
    *,
    include: Path | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
) -> Tasks:
    """lm-eval's tasks and groups `names`, whose data sets it downloads from the Hub, or has in its cache.

    `include` is a folder of further tasks in lm-eval's format, whose Python code is run. `few_shot` is the number of
    solved examples before each question: None takes the task's own number, and BLiMP never has any. `limit` takes the
    first documents of each task.

    Raises:
        MissingPackageError: lm-eval is not installed.
        ConfigError: there is no such task.
        DataError: the documents of a task are missing, or its solved examples.
    """
    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # it warns about settings that are intended
    try:
        import datasets
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingPackageError(
            f"lm-eval is needed ({error}); pip install 'scale-cpt[eval]'"
        ) from None
    datasets.disable_progress_bars()
    given = f"--tasks {' '.join(names)}"
    with faults_of_library(given, ConfigError):
        manager = TaskManager(
            include_path=include and str(include), include_defaults=include is None
        )
        if include is not None and not set(names) <= manager.task_index.keys():
            manager = TaskManager(
                include_path=str(include)
            )  # listing lm-eval's own 14,000 files takes ten seconds
    if unknown := [name for name in names if name not in manager.task_index]:
        where = "lm-eval has" if include is None else f"lm-eval and {include} have"
        raise ConfigError(
            f"--tasks {unknown[0]}: {where} no such task; `lm-eval ls tasks` lists them"
        )
    with faults_of_library(
        f"{given}: documents cannot be read; download them where there is a network", DataError
    ):
        loaded = dict(manager.load(list(names)))
    for name, task in loaded["tasks"].items():  # as lm-eval's own command line sets it
        own = task.get_config("num_fewshot")
        wanted = own if own == 0 or few_shot is None else few_shot
        if wanted and not (task.has_training_docs() or task.has_validation_docs()):
            raise DataError(
                f"{name}: --few-shot needs a train or validation split other than the one it is scored on"
            )
        task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    return Tasks(names, loaded, limit)


def task_results(model: Any, tasks: Tasks, *, chat_template: bool = False) -> list[Result]:
    """The results of an lm-eval model; if `tasks` name several, the last is the mean of their accuracies."""
    from lm_eval.evaluator import evaluate

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
    accuracies = [
        result for result in results if result.task in tasks.names and result.metric == "acc"
    ]
    if len(accuracies) > 1:
        mean = fmean(result.value for result in accuracies)
        results.append(
            Result(AVERAGE, "acc", mean, None, sum(result.documents for result in accuracies))
        )
    return results


def comparison(results: Mapping[str, Sequence[Result]]) -> str:
    """A table of several models' results, by the model's name, each with its standard error if there is one."""
    rows = []
    for row in zip(*results.values(), strict=True):
        cells = [row[0].task, row[0].metric, f"{row[0].documents:,}"]
        for result in row:
            cells += [
                f"{result.value:.4f}",
                "" if result.stderr is None else f"± {result.stderr:.4f}",
            ]
        rows.append(cells)
    return table(["task", "metric", "n", *(cell for name in results for cell in (name, ""))], rows)


def benchmark_model(
    folder: Path,
    *,
    batch_size: int = 16,
    prefix: Prefix = "document",
    chat_template: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """lm-eval's own model of the Hugging Face folder, on a GPU if there is one.

    Every prompt follows `prefix`, as documents do in training; or with `chat_template` it is a user's message, framed
    by the tokenizer's chat template, which writes all that it needs.

    Raises:
        DataError: the folder has no tokenizer, or that has no chat template.
        ConversionError: it is an export whose AutoTokenizer has other ids than its tokenizer.json.
        BaseModelError: the folder holds no model that can be loaded.
    """
    from lm_eval.models.huggingface import HFLM

    if chat_template:
        ChatTemplate(folder)  # there is one
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    read: tuple[int, ...] = ()
    if prefix == "none" and not has_tokenizer_file(folder):
        tokenizer = served_tokenizer(folder, trust_remote_code=trust_remote_code)
    else:
        # The ids of training and perplexity, whatever class the folder names.
        own = load_tokenizer(folder)
        check_served_ids(folder, own, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer_as_trained(folder, own)
        read = () if chat_template or prefix == "none" else own.before_document
    backend = getattr(
        tokenizer, "backend_tokenizer", None
    )  # None: Python code, which knows its own prefix
    if backend is not None:
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # as in training: a text has the same tokens each time
        names = [(backend.id_to_token(token), token) for token in read]
        backend.post_processor = TemplateProcessing(
            single=[*(name for name, _ in names), "$A"], special_tokens=names
        )
    last = read[-1] if read else None
    scored = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        prefix_token_id=last,
    )
    context = frequency_context(model.config)
    if context is not None:
        scored._loglikelihood_tokens = partial(
            _score_by_length, scored._loglikelihood_tokens, context
        )
        scored.generate_until = partial(_write_one_by_one, scored.generate_until)
    if spelling := exported_spelling(folder):
        score = scored._loglikelihood_tokens
        scored._loglikelihood_tokens = partial(
            _score_as_possible, score, spelling, scored.max_length
        )
    return scored


Request = tuple[Any, list[int], list[int]]
"""Of lm-eval: (names, context, continuation)."""
Scores = list[tuple[float, bool]]
"""The log likelihood of each continuation, and whether it is the likeliest."""


def _score_by_length(
    score: Callable[..., Scores],
    context: int,
    requests: Sequence[Request],
    **options: Any,
) -> Scores:
    """lm-eval's scores, of texts with other rotary frequencies, those beyond `context`, in batches of their own."""
    results: dict[int, tuple[float, bool]] = {}
    for is_long in (False, True):
        places = [
            place
            for place, (_, before, ids) in enumerate(requests)
            # The last token is predicted, and not read.
            if (len(before) + len(ids) - 1 > context) == is_long
        ]
        if places:
            found = score([requests[place] for place in places], **options)
            results.update(zip(places, found, strict=True))
    return [results[place] for place in range(len(requests))]


def _write_one_by_one(
    write: Callable[..., list[str]],
    requests: Sequence[Any],
    disable_tqdm: bool = False,
) -> list[str]:
    """lm-eval's answers, where a batch would have the rotary frequencies of its longest text."""
    answers = []
    with progress_bar("answers", len(requests), " answers") as bar:
        for request in requests:
            answers += write([request], disable_tqdm=True)
            bar.update(1)
    return answers


def _score_as_possible(
    score: Callable[..., Scores],
    spelling: Mapping[int, Sequence[int]],
    longest: int,
    requests: Sequence[Request],
    **options: Any,
) -> Scores:
    """lm-eval's scores of a model that reads at most `longest` tokens.

    A continuation that is impossible after a closed token is scored as the old pieces that its new ones stand for. They
    may be more tokens than the model reads at once: then it is scored in parts.
    """
    results = score(requests, **options)
    parts: list[Request] = []
    owners = []
    for place, (found, (names, context, ids)) in enumerate(zip(results, requests, strict=True)):
        if found[0] < NEVER / 2:
            spelled = [old for id_ in ids for old in spelling.get(id_, [id_])]
            of_place = _in_parts((names, context, spelled), longest)
            parts += of_place
            owners += [place] * len(of_place)
    again: dict[int, Scores] = {}
    for place, found in zip(owners, score(parts, **options) if parts else (), strict=True):
        again.setdefault(place, []).append(found)
    for place, of_parts in again.items():
        log_likelihood = sum(part for part, _ in of_parts)
        results[place] = log_likelihood, all(is_likeliest for _, is_likeliest in of_parts)
    return results


def _in_parts(request: Request, longest: int) -> list[Request]:
    """The request, or where its continuation is longer than `longest` tokens, several that continue each other.

    Each but the first follows at least half as many tokens as the model reads.
    """
    names, context, ids = request
    if len(ids) <= longest:
        return [request]
    text = [*context, *ids]
    cut = windows(len(text), longest + 1, (longest + 1) // 2, len(context))
    return [(names, text[start:first], text[first:stop]) for start, stop, first in cut]
