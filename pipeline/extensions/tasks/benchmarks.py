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
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.tokenizer_file import has_tokenizer_file
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
_FEW_SHOT_SEED = 1234
"""lm-eval's default."""


@dataclass(frozen=True)
class Tasks:
    """lm-eval's tasks as `TaskManager.load` gives them.

    Attributes:
        names: the tasks and groups that were asked for.
        loaded: the tasks, by name, under the key `tasks`; further entries are lm-eval's.
        limit: how many documents are taken of each task, the first ones; None: all.
    """

    names: Sequence[str]
    loaded: Mapping[str, Any]
    limit: int | None


@dataclass(frozen=True)
class Result:
    """The result of a model on a task.

    Attributes:
        task: name of the task or group.
        metric: name of the metric, such as `acc`.
        value: the metric's value.
        stderr: its standard error; None if lm-eval gives none.
        documents: number of documents that it is over.
    """

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
    setting: str = "--tasks",
) -> Tasks:
    """lm-eval's tasks and groups, whose data sets it downloads from the Hub or has in its cache.

    Args:
        names: tasks and groups.
        include: a folder of further tasks in lm-eval's format, whose Python code is run.
        few_shot: the number of solved examples before each question; default: the task's own
            number. BLiMP never has any.
        limit: take the first documents of each task.
        setting: what names the tasks, for errors.

    Raises:
        MissingPackageError: lm-eval is not installed.
        ConfigError: there is no such task.
        DataError: the documents of a task are missing, or its solved examples.
    """
    # lm-eval warns about settings that are intended here.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        import datasets
    except ImportError as error:
        fault = _missing(error)
        raise fault from None
    datasets.disable_progress_bars()
    given = f"{setting} {' '.join(names)}"
    manager = _task_manager(names, include, given)
    for name in names:
        if name not in manager.task_index:
            where = "lm-eval has" if include is None else f"lm-eval and {include} have"
            raise ConfigError(
                f"{setting} {name}: {where} no such task; `lm-eval ls tasks` lists them"
            )
    unreadable = f"{given}: documents cannot be read; download them where there is a network"
    with faults_of_library(unreadable, DataError):
        loaded = dict(manager.load(list(names)))

    # The number of examples is set as lm-eval's command line does it: its `evaluate` does not.
    for name, task in loaded["tasks"].items():
        examples = task.get_config("num_fewshot")
        if examples != 0 and few_shot is not None:
            examples = few_shot
        if examples and not (task.has_training_docs() or task.has_validation_docs()):
            raise DataError(
                f"{name}: --few-shot needs a train or validation split other than the one it is "
                "scored on"
            )
        task.set_config(key="num_fewshot", value=examples or 0)
    return Tasks(names, loaded, limit)


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(f"lm-eval is needed ({error}); pip install 'scale-cpt[eval]'")


def _task_manager(names: Sequence[str], include: Path | None, given: str) -> Any:
    """lm-eval's `TaskManager`, with the tasks of the folder `include`, and its own where needed."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        fault = _missing(error)
        raise fault from None
    with faults_of_library(given, ConfigError):
        if include is None:
            return TaskManager()
        # Listing lm-eval's own 14,000 files takes ten seconds.
        manager = TaskManager(include_path=str(include), include_defaults=False)
        if set(names) <= manager.task_index.keys():
            return manager
        return TaskManager(include_path=str(include))


def task_results(model: Any, tasks: Tasks, *, chat_template: bool = False) -> list[Result]:
    """The results of an lm-eval model on `tasks`, with the same solved examples at each call.

    If several tasks were asked for, the last result is the mean of their accuracies.
    """
    from lm_eval.evaluator import evaluate

    # A task keeps one random generator over all calls: without a new seed, a second call would have
    # other examples.
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    found = evaluate(
        model,
        dict(tasks.loaded),
        limit=tasks.limit,
        log_samples=False,
        apply_chat_template=chat_template,
        fewshot_as_multiturn=chat_template,
    )["results"]
    results: list[Result] = []
    # A group has results of its own beside those of its tasks; a tag has none. A dict removes names
    # that occur twice, and keeps their order.
    for name in dict.fromkeys([*tasks.names, *tasks.loaded["tasks"]]):
        results += _results_of(name, found.get(name, {}))

    accuracies: list[Result] = []
    for result in results:
        if result.task in tasks.names and result.metric == "acc":
            accuracies.append(result)
    if len(accuracies) > 1:
        mean = fmean(result.value for result in accuracies)
        documents = sum(result.documents for result in accuracies)
        results.append(Result(AVERAGE, "acc", mean, None, documents))
    return results


def _results_of(task: str, values: Mapping[str, Any]) -> list[Result]:
    """The results in lm-eval's entries of a task, whose keys are `metric,filter`."""
    results: list[Result] = []
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        stderr: float | None = None
        given = values.get(f"{metric}_stderr,{filtered}")
        if isinstance(given, (int, float)):
            # lm-eval writes "N/A" where it has no standard error.
            stderr = float(given)
        shown = metric
        if filtered != "none":
            # Written answers, such as those of GSM8K, are read by several filters.
            shown = f"{metric}.{filtered}"
        results.append(Result(task, shown, float(value), stderr, int(values["sample_len"])))
    return results


def comparison(results: Mapping[str, Sequence[Result]]) -> str:
    """A table of several models' results, by the model's name, with their standard errors."""
    header = ["task", "metric", "n"]
    for name in results:
        header += [name, ""]
    rows: list[list[str]] = []
    # The results of all models are of the same tasks and metrics, in the same order.
    for of_models in zip(*results.values(), strict=True):
        first = of_models[0]
        cells = [first.task, first.metric, f"{first.documents:,}"]
        for result in of_models:
            cells.append(f"{result.value:.4f}")
            cells.append("" if result.stderr is None else f"± {result.stderr:.4f}")
        rows.append(cells)
    return table(header, rows)


def benchmark_model(
    folder: Path,
    *,
    batch_size: int = 16,
    prefix: Prefix = "document",
    chat_template: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """lm-eval's own model of the Hugging Face folder, on a GPU if there is one.

    Every prompt follows `prefix`, as documents do in training. With `chat_template` a prompt is a
    user's message instead. The tokenizer's chat template frames it, start token included.

    Raises:
        DataError: the folder has no tokenizer, or the tokenizer no chat template.
        ConversionError: it is an export whose AutoTokenizer has other ids than its tokenizer.json.
        BaseModelError: the folder holds no model that can be loaded.
    """
    from lm_eval.models.huggingface import HFLM

    if chat_template:
        ChatTemplate(folder)  # raises DataError where there is none
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer, before = _benchmark_tokenizer(
        folder,
        prefix=prefix,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    scored = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        # The token that lm-eval takes for an empty context; None: the tokenizer's own.
        prefix_token_id=before[-1] if before else None,
    )
    context = frequency_context(model.config)
    if context is not None:
        # lm-eval has no public place for it: all its scores of texts pass through this method.
        score = scored._loglikelihood_tokens
        scored._loglikelihood_tokens = partial(_score_by_length, score, context)
        scored.generate_until = partial(_write_one_by_one, scored.generate_until)
    spelling = exported_spelling(folder)
    if spelling:
        score = scored._loglikelihood_tokens
        scored._loglikelihood_tokens = partial(
            _score_as_possible, score, spelling, scored.max_length
        )
    return scored


def _benchmark_tokenizer(
    folder: Path, *, prefix: Prefix, chat_template: bool, trust_remote_code: bool
) -> tuple[Any, tuple[int, ...]]:
    """A transformers tokenizer with the ids of training, and the ids that it puts before texts."""
    before: tuple[int, ...] = ()
    if prefix == "none" and not has_tokenizer_file(folder):
        tokenizer = served_tokenizer(folder, trust_remote_code=trust_remote_code)
    else:
        # The ids of training and perplexity, whatever class the folder names.
        own = load_tokenizer(folder)
        check_served_ids(folder, own, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer_as_trained(folder, own)
        if prefix == "document" and not chat_template:
            before = own.before_document

    # A tokenizer that is Python code has no backend; it adds its own prefix.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # as in training: a text has the same tokens each time
        names: list[str] = [backend.id_to_token(token) for token in before]
        # $A stands for the text.
        backend.post_processor = TemplateProcessing(
            single=[*names, "$A"], special_tokens=list(zip(names, before, strict=True))
        )
    return tokenizer, before


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
    """lm-eval's scores, with texts longer than `context` in batches of their own.

    Such texts have other rotary frequencies, and a batch has the frequencies of its longest text.
    """
    places: dict[bool, list[int]] = {False: [], True: []}
    for place, (_, before, ids) in enumerate(requests):
        # The last token is predicted, and not read.
        is_long = len(before) + len(ids) - 1 > context
        places[is_long].append(place)
    results: dict[int, tuple[float, bool]] = {}
    for alike in places.values():
        if not alike:
            continue
        found = score([requests[place] for place in alike], **options)
        for place, result in zip(alike, found, strict=True):
            results[place] = result
    return [results[place] for place in range(len(requests))]


def _write_one_by_one(
    write: Callable[..., list[str]],
    requests: Sequence[Any],
    disable_tqdm: bool = False,
) -> list[str]:
    """lm-eval's answers, each in a batch of its own.

    A batch has the rotary frequencies of its longest text, and texts grow while they are written.
    """
    answers: list[str] = []
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
    """lm-eval's scores of a gated model with an extended vocabulary.

    A continuation with a new token after a closed token is impossible. It is scored again, with the
    base's tokens that spell its new tokens, and in parts where these are more than the model reads
    at once.

    Args:
        score: lm-eval's function.
        spelling: the base's tokens that spell a new token, by its id.
        longest: how many tokens the model reads at most.
        requests: the contexts and continuations.
        options: for `score`.
    """
    results = score(requests, **options)
    parts: list[Request] = []
    owners: list[int] = []
    for place, (names, context, ids) in enumerate(requests):
        log_likelihood, _ = results[place]
        if log_likelihood >= NEVER / 2:
            continue
        spelled: list[int] = []
        for id_ in ids:
            spelled += spelling.get(id_, [id_])
        for part in _in_parts((names, context, spelled), longest):
            parts.append(part)
            owners.append(place)
    if not parts:
        return results

    again: dict[int, Scores] = {}
    for place, found in zip(owners, score(parts, **options), strict=True):
        again.setdefault(place, []).append(found)
    for place, of_parts in again.items():
        # The parts continue each other: their log likelihoods add up.
        total = 0.0
        all_likeliest = True
        for log_likelihood, is_likeliest in of_parts:
            total += log_likelihood
            all_likeliest = all_likeliest and is_likeliest
        results[place] = total, all_likeliest
    return results


def _in_parts(request: Request, longest: int) -> list[Request]:
    """The request, or several requests that continue each other if its continuation is too long.

    A continuation may have `longest` tokens. Each part but the first has a context of at least half
    as many.
    """
    names, context, ids = request
    if len(ids) <= longest:
        return [request]
    text = [*context, *ids]
    parts: list[Request] = []
    # One more than the model reads: the last token is predicted only.
    for start, stop, first in windows(len(text), longest + 1, (longest + 1) // 2, len(context)):
        parts.append((names, text[start:first], text[first:stop]))
    return parts
