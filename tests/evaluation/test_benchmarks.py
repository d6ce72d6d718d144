"""lm-eval's tasks on local files: real models, compared with accuracies from transformers' logits."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError, DataError, MissingPackageError
from pipeline.evaluation.benchmarks import (
    AVERAGE,
    Result,
    _hf_model,
    comparison,
    load_tasks,
    run_benchmarks,
    task_results,
)
from pipeline.evaluation.scoring_model import ScoringModel
from tests.bases import STORIES
from tests.evaluation.task_files import ARC, BLIMP, COPA, write_task_files
from tests.programs import scale_cpt
from tests.rehearsal.helpers import copied_stories, own_decoder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def log_likelihood():
    """The log likelihood of a text after a context; an empty context is a BOS."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(STORIES), AutoTokenizer.from_pretrained(STORIES)

    @torch.no_grad()
    def measured(context: str, text: str) -> float:
        def ids(of: str) -> list[int]:
            return [tokenizer.bos_token_id, *tokenizer(of, add_special_tokens=False).input_ids]

        tokens, read = ids(context + text), len(ids(context))
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return float(sum(logits[at - 1, tokens[at]] for at in range(read, len(tokens))))

    return measured


def scored(tasks: list[str], **options) -> list[Result]:
    return run_benchmarks(STORIES, load_tasks(tasks, **options))


def test_accuracy_is_that_of_transformers_logits(files, no_network, log_likelihood):
    results = scored(["copa", "arc", "passive_1"], include=files)
    found = {(result.task, result.metric): result.value for result in results}

    def accuracy(questions) -> tuple[float, float]:
        """By log likelihood, and by log likelihood per byte."""
        plain = per_byte = 0
        for context, answers, right in questions:
            scores = [log_likelihood(context, f" {answer}" if context else answer) for answer in answers]
            shares = [score / len(answer.encode()) for score, answer in zip(scores, answers, strict=True)]
            plain += scores.index(max(scores)) == right
            per_byte += shares.index(max(shares)) == right
        return plain / len(questions), per_byte / len(questions)

    copa = [(q["premise"], q["alternatives"], q["label"]) for q in COPA]
    arc = [(f"Question: {q['question']}\nAnswer:", q["choices"], q["answer"]) for q in ARC]
    blimp = [("", q["pair"], 0) for q in BLIMP]
    expected = {"copa": accuracy(copa)[0], "arc": accuracy(arc)[0], "passive_1": accuracy(blimp)[0]}
    assert {task: found[task, "acc"] for task in expected} == expected and expected["passive_1"] > 0.5
    assert found["arc", "acc_norm"] == accuracy(arc)[1]
    assert found[AVERAGE, "acc"] == pytest.approx(sum(expected.values()) / 3)
    documents = {result.task: result.documents for result in results}
    assert documents == {"copa": 12, "arc": 6, "passive_1": 6, AVERAGE: 24}


@pytest.mark.parametrize("has_start", [True, False])
def test_a_model_in_training_answers_as_lm_eval_does(has_start, files, tmp_path):
    """Compared with lm-eval's own model of the same folder, batched otherwise."""
    base = STORIES if has_start else copied_stories(tmp_path / "base", tokenizer={"post_processor": None})
    decoder, tokenizer = own_decoder(base), load_tokenizer(base)

    def scores(tokens, targets):
        losses = decoder(tokens, targets)
        return losses.nll, losses.is_greedy_choice

    ours = ScoringModel(scores, tokenizer, context=decoder.spec.max_position_embeddings, batch_size=5)
    theirs = _hf_model(base, 2, "document", trust_remote_code=False)
    assert theirs.tok_encode("a")[:-1] == ours.tok_encode("a")[:-1] == list(tokenizer.before_document)
    assert theirs.tok_batch_encode(["a"])[0][0, 0] == tokenizer.before_document[0]
    assert _hf_model(base, 2, "none", trust_remote_code=False).tok_encode("a") == ours.tok_encode("a")[1:]
    pairs = [("", "Tom ran"), ("Tom was", " sad"), ("a " * 600, "b")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for (found, greedy), (expected, is_greedy) in zip(
        ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-4) and greedy == is_greedy  # fp32, two orders of sums
    tasks = load_tasks(["copa", "passive"], include=files)
    for own, expected in zip(task_results(ours, tasks), run_benchmarks(base, tasks), strict=True):
        assert (own.task, own.metric, own.documents) == (expected.task, expected.metric, expected.documents)
        assert own.value == pytest.approx(expected.value)


def test_a_group_is_the_mean_of_its_tasks(files, no_network):
    results = scored(["passive"], include=files)
    by_task = {result.task: result for result in results}
    assert list(by_task) == ["passive", "passive_1", "passive_2"]
    right = sum(by_task[f"passive_{n}"].value * by_task[f"passive_{n}"].documents for n in (1, 2))
    assert (by_task["passive"].value, by_task["passive"].documents) == (pytest.approx(right / 9), 9)
    header, _, first, *_ = comparison({"base": results, "exported": results}).splitlines()
    assert header.split() == ["task", "metric", "n", "base", "exported"]
    assert first.split()[:3] == ["passive", "acc", "9"] and first.count("±") == 2


def test_a_chat_template_frames_each_question(files, tmp_path, log_likelihood):
    """Nothing else stands before it."""
    framed = copied_stories(
        tmp_path / "a",
        tokenizer_config={"chat_template": "{% for m in messages %}{{ bos_token }}{{ m.content }}!{% endfor %}"},
    )
    right = 0
    for question in COPA:
        scores = [log_likelihood(question["premise"] + "!", f" {text}") for text in question["alternatives"]]
        right += scores.index(max(scores)) == question["label"]
    (found,) = run_benchmarks(framed, load_tasks(["copa"], include=files), chat_template=True)
    assert found.value == right / len(COPA)
    with pytest.raises(DataError, match="has no chat template"):
        run_benchmarks(STORIES, load_tasks(["copa"], include=files), chat_template=True)


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

    refused(DataError, "expected a folder with lm-eval's task files", "copa", tmp_path)
    refused(ConfigError, "--tasks mine: lm-eval has no such task", "mine", files)
    copied = write_task_files(tmp_path / "copied")
    (copied / "copa.jsonl").unlink()
    refused(DataError, "copa: its documents cannot be read", "copa", copied)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    refused(MissingPackageError, r"lm-eval: 0\.4\.13 or newer.*pip install 'scale-cpt\[eval\]'", "copa", files)


def test_the_command_line_compares_models(files):
    models = [str(STORIES), os.path.relpath(STORIES)]
    options = ["--include-path", files, "--tasks", "copa", "passive", "--limit", "3", "--json"]
    done = scale_cpt("evaluate", *options, "--model", *models)
    assert done.returncode == 0, done.stderr
    first, second = (results := json.loads(done.stdout)).values()
    assert list(results) == models and first == second
    assert {row["task"] for row in first} == {"copa", "passive", "passive_1", "passive_2", AVERAGE}
