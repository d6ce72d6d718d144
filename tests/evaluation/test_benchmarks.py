"""lm-eval's tasks on local files: real models, compared with accuracies from transformers' logits."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import yaml
import zstandard
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
from tests.data.helpers import run_main
from tests.evaluation.task_files import ARC, BLIMP, COPA, write_task_files
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
    results = scored(["kobest_copa", "arc_easy", "blimp_passive_1"], data=files)
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

    connectors = {"원인": " 왜냐하면", "결과": " 그래서"}
    copa = [
        (f"{q['premise']} {connectors[q['question']]}", (q["alternative_1"], q["alternative_2"]), q["label"])
        for q in COPA
    ]
    arc = [
        (f"Question: {q['question']}\nAnswer:", q["choices"]["text"], q["choices"]["label"].index(q["answerKey"]))
        for q in ARC
    ]
    blimp = [("", (pair["sentence_good"], pair["sentence_bad"]), 0) for pair in BLIMP]
    expected = {"kobest_copa": accuracy(copa)[0], "arc_easy": accuracy(arc)[0], "blimp_passive_1": accuracy(blimp)[0]}
    assert {task: found[task, "acc"] for task in expected} == expected and expected["blimp_passive_1"] > 0.5
    assert found["arc_easy", "acc_norm"] == accuracy(arc)[1]
    assert found[AVERAGE, "acc"] == pytest.approx(sum(expected.values()) / 3)
    documents = {result.task: result.documents for result in results}
    assert documents == {"kobest_copa": 12, "arc_easy": 6, "blimp_passive_1": 6, AVERAGE: 24}


@pytest.mark.parametrize("has_start", [True, False])
def test_a_model_in_training_answers_as_lm_eval_does(has_start, files, tmp_path):
    """Compared with lm-eval's own model of the same folder, batched otherwise."""
    base = STORIES if has_start else copied_stories(tmp_path / "base", tokenizer={"post_processor": None})
    decoder, tokenizer = own_decoder(base), load_tokenizer(base)

    def scores(tokens, targets):
        losses = decoder(tokens, targets)
        return losses.nll, losses.is_greedy_choice

    ours = ScoringModel(scores, tokenizer, context=decoder.spec.longest_text, batch_size=5)
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
    tasks = load_tasks(["kobest_copa", "blimp"], data=files)
    for own, expected in zip(task_results(ours, tasks), run_benchmarks(base, tasks), strict=True):
        assert (own.task, own.metric, own.documents) == (expected.task, expected.metric, expected.documents)
        assert own.value == pytest.approx(expected.value)


def test_a_group_is_its_tasks_that_have_files(files, no_network):
    results = scored(["blimp"], data=files)
    by_task = {result.task: result for result in results}
    assert list(by_task) == ["blimp", "blimp_passive_1", "blimp_passive_2"]
    right = sum(by_task[f"blimp_passive_{n}"].value * by_task[f"blimp_passive_{n}"].documents for n in (1, 2))
    assert (by_task["blimp"].value, by_task["blimp"].documents) == (pytest.approx(right / 9), 9)
    header, _, first, *_ = comparison({"base": results, "exported": results}).splitlines()
    assert header.split() == ["task", "metric", "n", "base", "exported"]
    assert first.split()[:3] == ["blimp", "acc", "9"] and first.count("±") == 2


def test_limits_and_solved_examples(files):
    plain, solved = (scored(["kobest_copa"], data=files, limit=8, few_shot=count) for count in (0, 2))
    assert {result.documents for result in (*plain, *solved)} == {8}
    with pytest.raises(DataError, match="arc_easy: --few-shot needs"):
        load_tasks(["arc_easy"], data=files, few_shot=1)


def test_compressed_files_give_the_same(files, tmp_path):
    (tmp_path / "blimp").mkdir()
    packed = zstandard.compress((files / "blimp" / "passive_1.jsonl").read_bytes())
    (tmp_path / "blimp" / "passive_1.jsonl.zst").write_bytes(packed)
    assert scored(["blimp_passive_1"], data=files) == scored(["blimp_passive_1"], data=tmp_path)


def test_errors_name_what_is_missing(files, tmp_path, monkeypatch):
    def refused(error, match, task, data=tmp_path, **options):
        with pytest.raises(error, match=match) as caught:
            load_tasks([task], data=data, **options)
        assert "\n" not in str(caught.value)

    refused(DataError, r"arc_easy/test\.jsonl: no such file; arc_easy is scored on it", "arc_easy")
    refused(DataError, "no file for any task of blimp", "blimp")
    refused(ConfigError, "--tasks mmlu: cannot be read from local files.*kobest_copa", "mmlu")
    refused(ConfigError, "--limit: expected at least 1, found 0", "arc_easy", limit=0)
    copa = tmp_path / "kobest" / "copa" / "test.jsonl"
    copa.parent.mkdir(parents=True)
    for content, message in {
        '{"premise": 1}\n{"pre': "line 2: expected a JSON object",
        "[1]": "line 1: expected a JSON object",
        "": "holds no document",
        '{"premise": "x"}': "not the documents of lm-eval's kobest_copa: 'question'",
    }.items():
        copa.write_text(content)
        refused(DataError, message, "kobest_copa")
    for module in ("lm_eval.tasks", "pipeline.evaluation.local_tasks"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(MissingPackageError, r"lm-eval: 0\.4\.13 or newer.*pip install 'scale-cpt\[eval\]'", "arc_easy", data=files)


def test_the_command_line_compares_models(files):
    models = [str(STORIES), os.path.relpath(STORIES)]
    options = ["--data", files, "--tasks", "kobest_copa", "blimp"]
    done = run_main("evaluate.py", *options, "--limit", "3", "--json", "--model", *models)
    assert done.returncode == 0, done.stderr
    first, second = (results := json.loads(done.stdout)).values()
    assert list(results) == models and first == second
    assert {row["task"] for row in first} == {"kobest_copa", "blimp", "blimp_passive_1", "blimp_passive_2", AVERAGE}
    done = run_main("evaluate.py", "--model", STORIES, *options, "--include-path", files)
    assert done.returncode == 2 and "--include-path: its tasks name their own documents" in done.stderr


def test_a_users_own_task_by_its_name(tmp_path, no_network, monkeypatch, log_likelihood):
    asked = [("Tom was hungry. He", ["ate", "sang"], 0), ("Lily saw a", ["of", "dog"], 1)]
    lines = [json.dumps({"q": q, "a": answers, "right": right}) for q, answers, right in asked]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    task = {
        "task": "my_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "q",
        "doc_to_choice": "a",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    }
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_choices.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (result,) = scored(["my_choices"], include=mine)
    likelihoods = [[log_likelihood(q, f" {answer}") for answer in answers] for q, answers, _ in asked]
    expected = [own.index(max(own)) == right for own, (_, _, right) in zip(likelihoods, asked, strict=True)]
    assert (result.task, result.value, result.documents) == ("my_choices", sum(expected) / 2, 2)
    with pytest.raises(DataError, match=r"expected a folder with lm-eval's task files"):
        load_tasks(["my_choices"], include=tmp_path / "none")
