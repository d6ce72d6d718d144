"""lm-eval's tasks on local files: real models, compared with accuracies from transformers'
logits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError, MissingPackageError
from pipeline.extensions.tasks.benchmarks import (
    AVERAGE,
    Result,
    benchmark_model,
    comparison,
    load_tasks,
    task_results,
)
from tests.bases import STORIES
from tests.extensions.self_generated.helpers import copied_stories
from tests.extensions.tasks.task_files import ARC, BLIMP, COPA, write_task_files
from tests.programs import scale_cpt

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def log_likelihood():
    """The log likelihood of a text after a context; an empty context is a BOS."""
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    tokenizer = AutoTokenizer.from_pretrained(STORIES)

    @torch.no_grad()
    def measured(context: str, text: str) -> float:
        def ids(of: str) -> list[int]:
            return [tokenizer.bos_token_id, *tokenizer(of, add_special_tokens=False).input_ids]

        tokens = ids(context + text)
        log_probabilities = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        total = 0.0
        for place in range(len(ids(context)), len(tokens)):
            total += log_probabilities[place - 1, tokens[place]]
        return float(total)

    return measured


def scored(tasks: list[str], **options) -> list[Result]:
    return task_results(benchmark_model(STORIES), load_tasks(tasks, **options))


def test_accuracy_is_that_of_transformers_logits(files, log_likelihood):
    results = scored(["copa", "arc", "passive"], include=files)
    found = {(result.task, result.metric): result.value for result in results}

    def accuracy(questions) -> tuple[float, float]:
        """By log likelihood, and by log likelihood per byte."""
        right_by_score = 0
        right_by_byte = 0
        for context, answers, right in questions:
            scores = []
            per_byte = []
            for answer in answers:
                # lm-eval puts a space between a question and an answer, and counts bytes without.
                score = log_likelihood(context, f" {answer}" if context else answer)
                scores.append(score)
                per_byte.append(score / len(answer.encode()))
            right_by_score += scores.index(max(scores)) == right
            right_by_byte += per_byte.index(max(per_byte)) == right
        return right_by_score / len(questions), right_by_byte / len(questions)

    copa, _ = accuracy([(q["premise"], q["alternatives"], q["label"]) for q in COPA])
    arc, arc_per_byte = accuracy(
        [(f"Question: {q['question']}\nAnswer:", q["choices"], q["answer"]) for q in ARC]
    )
    passive_1, _ = accuracy([("", q["pair"], 0) for q in BLIMP])
    assert found["copa", "acc"] == copa
    assert found["arc", "acc"] == arc
    assert found["arc", "acc_norm"] == arc_per_byte
    assert found["passive_1", "acc"] == passive_1
    assert passive_1 > 0.5, "no better than chance: the comparison says little"

    # A group weights its tasks by documents; the average of all weights tasks and groups alike.
    passive = (6 * found["passive_1", "acc"] + 3 * found["passive_2", "acc"]) / 9
    assert found["passive", "acc"] == pytest.approx(passive)
    assert found[AVERAGE, "acc"] == pytest.approx((copa + arc + passive) / 3)
    documents = {result.task: result.documents for result in results}
    assert documents == {
        "copa": 12,
        "arc": 6,
        "passive": 9,
        "passive_1": 6,
        "passive_2": 3,
        AVERAGE: 27,
    }
    header, _, first, *_ = comparison({"base": results, "exported": results}).splitlines()
    assert header.split() == ["task", "metric", "n", "base", "exported"]
    assert first.split()[:3] == ["copa", "acc", "12"] and first.count("±") == 2


def test_results_are_those_of_simple_evaluate(files):
    """docs/adr/0086: the library's front would give the same, and read the tasks anew each time."""
    model = benchmark_model(STORIES)
    found = simple_evaluate(
        model,
        tasks=["copa", "arc"],
        task_manager=TaskManager(include_path=str(files), include_defaults=False),
        log_samples=False,
        verbosity="ERROR",
    )
    expected = {("copa", "acc"), ("arc", "acc"), ("arc", "acc_norm")}
    results = task_results(model, load_tasks(["copa", "arc"], include=files))[:-1]
    assert {(one.task, one.metric) for one in results} == expected
    for one in results:
        assert one.value == found["results"][one.task][f"{one.metric},none"]


def test_each_call_has_the_same_solved_examples(files):
    """Two models, or two validations of one, answer the same prompts."""
    model = benchmark_model(STORIES)
    asked: list[tuple[str, str]] = []
    score = model.loglikelihood

    def noted(requests, **options):
        asked.extend(request.args for request in requests)
        return score(requests, **options)

    model.loglikelihood = noted
    tasks = load_tasks(["copa"], include=files, few_shot=3)
    first = task_results(model, tasks)
    count = len(asked)
    assert count == 2 * len(COPA) and asked[0][0].count("\n\n") == 3
    assert task_results(model, tasks) == first
    assert asked[count:] == asked[:count]


@pytest.mark.parametrize("has_start", [True, False])
def test_a_prompt_follows_what_documents_follow_in_training(has_start, tmp_path):
    base = (
        STORIES
        if has_start
        else copied_stories(tmp_path / "base", tokenizer={"post_processor": None})
    )
    before, alone = (
        load_tokenizer(base).before_document,
        benchmark_model(base, prefix="none").tok_encode("a"),
    )
    assert benchmark_model(base).tok_encode("a") == [*before, *alone]


def test_a_chat_template_frames_each_question(files, tmp_path, log_likelihood):
    """Nothing else stands before it."""
    framed = copied_stories(
        tmp_path / "a",
        tokenizer_config={
            "chat_template": "{% for m in messages %}{{ bos_token }}{{ m.content }}!{% endfor %}"
        },
    )
    right = 0
    for question in COPA:
        scores = [
            log_likelihood(question["premise"] + "!", f" {text}")
            for text in question["alternatives"]
        ]
        right += scores.index(max(scores)) == question["label"]
    tasks = load_tasks(["copa"], include=files)
    (found,) = task_results(benchmark_model(framed, chat_template=True), tasks, chat_template=True)
    assert found.value == right / len(COPA)
    with pytest.raises(DataError, match="has no chat template"):
        benchmark_model(STORIES, chat_template=True)


def test_limits_and_solved_examples(files):
    plain, solved = (scored(["copa"], include=files, limit=8, few_shot=count) for count in (0, 2))
    assert {result.documents for result in (*plain, *solved)} == {8}
    with pytest.raises(DataError, match="arc: --few-shot needs"):
        load_tasks(["arc"], include=files, few_shot=1)


def test_errors_name_what_is_missing(files, tmp_path, monkeypatch):
    def refused(error, match, task, include):
        with pytest.raises(error, match=match) as caught:
            load_tasks([task], include=include)
        assert "\n" not in str(caught.value)

    refused(ConfigError, "--tasks mine: lm-eval and .* have no such task", "mine", files)
    copied = write_task_files(tmp_path / "copied")
    (copied / "copa.jsonl").unlink()
    refused(DataError, "--tasks copa: documents cannot be read", "copa", copied)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    refused(
        MissingPackageError, r"lm-eval is needed.*pip install 'scale-cpt\[eval\]'", "copa", files
    )


def test_the_command_line_compares_models(files):
    models = [str(STORIES), os.path.relpath(STORIES)]
    options = ["--include-path", files, "--tasks", "copa", "passive", "--limit", "3", "--json"]
    done = scale_cpt("evaluate", *options, "--model", *models)
    assert done.returncode == 0, done.stderr
    first, second = (results := json.loads(done.stdout)).values()
    assert list(results) == models and first == second
    assert {row["task"] for row in first} == {"copa", "passive", "passive_1", "passive_2", AVERAGE}


def test_a_text_has_the_same_tokens_each_time_though_the_tokenizer_has_dropout(tmp_path):
    described = json.loads((STORIES / "tokenizer.json").read_text())["model"]
    base = copied_stories(tmp_path / "base", tokenizer={"model": described | {"dropout": 0.5}})
    encode, text = benchmark_model(base).tok_encode, "Once upon a time there was a little dog"
    assert [encode(text) for _ in range(20)] == [benchmark_model(STORIES).tok_encode(text)] * 20
