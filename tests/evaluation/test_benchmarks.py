"""lm-eval's tasks on local files: real models, compared with accuracies from transformers' logits."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
import yaml
import zstandard
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import evaluation
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError, DataError, MissingPackageError
from pipeline.evaluation.benchmarks import AVERAGE, _hf_model, comparison, load_tasks, run_benchmarks, task_results
from pipeline.evaluation.local_tasks import load_local_tasks
from pipeline.evaluation.scoring_model import ScoringModel
from tests.bases import STORIES
from tests.data.helpers import run_main
from tests.evaluation.task_files import ARC, BLIMP, COPA, write_task_files
from tests.rehearsal.helpers import copied_stories, own_decoder

TASKS = ("kobest_boolq", "kobest_copa", "kobest_hellaswag", "arc_easy", "blimp_passive_1")


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


def test_accuracy_is_that_of_transformers_logits(files, no_network, log_likelihood):
    results = run_benchmarks(STORIES, ["kobest_copa", "arc_easy", "blimp_passive_1"], data=files)
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
    assert found["kobest_copa", "acc"] == accuracy(copa)[0]
    assert (found["arc_easy", "acc"], found["arc_easy", "acc_norm"]) == accuracy(arc)
    assert found["blimp_passive_1", "acc"] == accuracy(blimp)[0] > 0.5  # it writes English
    assert found[AVERAGE, "acc"] == pytest.approx(
        sum(found[task, "acc"] for task in ("kobest_copa", "arc_easy", "blimp_passive_1")) / 3
    )
    assert {result.task: result.documents for result in results} == {
        "kobest_copa": 12,
        "arc_easy": 6,
        "blimp_passive_1": 6,
        AVERAGE: 24,
    }


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
    asked = [
        Instance("loglikelihood", {}, pair, 0) for pair in [("", "Tom ran"), ("Tom was", " sad"), ("a " * 600, "b")]
    ]
    for (found, greedy), (expected, expected_greedy) in zip(
        ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-4) and greedy == expected_greedy  # fp32, two orders of sums
    tasks = load_tasks(["kobest_copa", "blimp"], data=files)
    for own, expected in zip(task_results(ours, tasks), run_benchmarks(base, tasks.names, data=files), strict=True):
        assert (own.task, own.metric, own.documents) == (expected.task, expected.metric, expected.documents)
        assert own.value == pytest.approx(expected.value)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_and_metrics_are_lm_evals_own(task, files):
    """Its YAML file, read here independently, says the same as the task that runs."""
    config = load_local_tasks([task], files)["tasks"][task].config
    (path,) = Path(lm_eval.tasks.__file__).parent.glob(f"*/{task.removeprefix('blimp_')}.yaml")

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda _, node: node.value.rpartition(".")[2])
    own = yaml.load(path.read_text(encoding="utf-8"), Loader)
    if "include" in own:
        own = yaml.load((path.parent / own["include"]).read_text(encoding="utf-8"), Loader) | own

    def plain(value):
        return value.__name__ if callable(value) else value

    for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "output_type", "num_fewshot"):
        expected = own.get(key)
        assert plain(getattr(config, key)) == expected, key
    for metric, expected in zip(config.metric_list, own["metric_list"], strict=True):
        assert {key: plain(value) for key, value in metric.items()} == {
            key: value for key, value in expected.items() if key != "hf_evaluate"
        }
    assert config.metadata["version"] == own["metadata"]["version"]
    assert config.target_delimiter == " " and config.description == ""


def test_a_group_is_its_tasks_that_have_files(files, no_network):
    results = {result.task: result for result in run_benchmarks(STORIES, ["blimp"], data=files)}
    assert list(results) == ["blimp", "blimp_passive_1", "blimp_passive_2"]
    right = sum(results[f"blimp_passive_{n}"].value * results[f"blimp_passive_{n}"].documents for n in (1, 2))
    assert results["blimp"].value == pytest.approx(right / 9)
    assert results["blimp"].documents == 9


def test_limits_and_solved_examples(files):
    plain, solved = (
        run_benchmarks(STORIES, ["kobest_copa"], data=files, limit=8, few_shot=count, batch_size=3) for count in (0, 2)
    )
    assert {result.documents for result in (*plain, *solved)} == {8}
    with pytest.raises(DataError, match="arc_easy: --few-shot needs"):
        run_benchmarks(STORIES, ["arc_easy"], data=files, few_shot=1)


def test_compressed_files_give_the_same(files, tmp_path):
    (tmp_path / "blimp").mkdir()
    many = b"".join(json.dumps({**BLIMP[0], "padding": "ab" * 1000}).encode() + b"\n" for _ in range(1500))
    (tmp_path / "blimp" / "passive_2.jsonl.zst").write_bytes(zstandard.compress(many))
    assert len(load_local_tasks(["blimp_passive_2"], tmp_path)["tasks"]["blimp_passive_2"].eval_docs) == 1500
    packed = zstandard.compress((files / "blimp" / "passive_1.jsonl").read_bytes())
    (tmp_path / "blimp" / "passive_1.jsonl.zst").write_bytes(packed)
    both = [run_benchmarks(STORIES, ["blimp_passive_1"], data=folder) for folder in (files, tmp_path)]
    assert both[0] == both[1]


def test_errors_name_what_is_missing(files, tmp_path, monkeypatch):
    def refused(error, match, *tasks, data=tmp_path, **options):
        with pytest.raises(error, match=match) as caught:
            run_benchmarks(STORIES, tasks, data=data, **options)
        assert "\n" not in str(caught.value)

    refused(DataError, r"arc_easy/test\.jsonl: no such file; arc_easy is scored on it", "arc_easy")
    refused(DataError, "no file for any task of blimp", "blimp")
    refused(ConfigError, "--tasks mmlu: cannot be read from local files.*kobest_copa", "mmlu")
    refused(ConfigError, "--limit: expected at least 1, found 0", "arc_easy", limit=0)
    copa = tmp_path / "kobest" / "copa" / "test.jsonl"
    copa.parent.mkdir(parents=True)
    for content, message in {
        '{"premise": 1}\n{"pre': "line 2 is not JSON",
        "[1]": "line 1: expected a JSON object, found list",
        "": "holds no document",
        '{"premise": "x"}': "not the documents of lm-eval's kobest_copa: 'question'",
    }.items():
        copa.write_text(content)
        refused(DataError, message, "kobest_copa")

    def version(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("pipeline.evaluation.benchmarks.version", version)
    refused(MissingPackageError, r"not installed.*pip install 'scale-cpt\[eval\]'", "arc_easy", data=files)
    monkeypatch.setattr("pipeline.evaluation.benchmarks.version", lambda _: "0.4.9.2")
    refused(MissingPackageError, r"found 0\.4\.9\.2", "arc_easy", data=files)


def test_the_command_line_compares_models(files):
    models = [str(STORIES), os.path.relpath(STORIES)]
    done = run_main(
        "evaluate.py",
        *("--tasks", "kobest_copa", "blimp", "--data", files, "--limit", "3", "--json", "--model", *models),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert list(results) == models
    first, second = results.values()
    assert first == second
    assert {result["task"] for result in first} == {
        "kobest_copa", "blimp", "blimp_passive_1", "blimp_passive_2", AVERAGE,
    }  # fmt: skip


def test_without_lm_eval_the_command_line_names_the_package_to_install(files, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("benchmarks", "local_tasks"):  # imported again by the command line
        monkeypatch.setattr(evaluation, module, sys.modules[f"pipeline.evaluation.{module}"])
        monkeypatch.delitem(sys.modules, f"pipeline.evaluation.{module}")

    def not_installed(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    done = run_main("evaluate.py", "--tasks", "arc_easy", "--data", files, "--model", STORIES)
    assert done.returncode == 1
    assert done.stderr.startswith("error: lm-eval: not installed")


def test_the_table_has_a_column_per_model(files):
    results = run_benchmarks(STORIES, ["kobest_copa"], data=files)
    header, _, accuracy, f1 = comparison({"base": results, "exported": results}).splitlines()
    assert header.split() == ["task", "metric", "n", "base", "exported"]
    assert accuracy.split()[:3] == ["kobest_copa", "acc", "12"] and accuracy.count("±") == 2
    assert f1.split()[1] == "f1" and "±" not in f1


@pytest.mark.skipif("SCALE_CPT_DATA" not in os.environ, reason="SCALE_CPT_DATA names no folder with benchmarks")
def test_the_real_files_are_read_completely(no_network):
    data = Path(os.environ["SCALE_CPT_DATA"]) / "eval"
    tasks = load_local_tasks([*TASKS[:4], "blimp"], data)["tasks"]
    sizes = {name: len(task.eval_docs) for name, task in tasks.items()}
    assert sizes.pop("kobest_boolq") == 1404 and sizes.pop("kobest_copa") == 1000
    assert sizes.pop("kobest_hellaswag") == 500 and sizes.pop("arc_easy") == 2376
    assert len(sizes) == 5 and set(sizes.values()) == {1000}


def test_a_users_own_task_by_its_name(tmp_path, no_network, monkeypatch, log_likelihood):
    questions = tmp_path / "questions.jsonl"
    asked = [("Tom was hungry. He", ["ate", "sang"], 0), ("Lily saw a", ["of", "dog"], 1)]
    questions.write_text(
        "".join(json.dumps({"q": q, "a": answers, "right": right}) + "\n" for q, answers, right in asked)
    )
    task = {
        "task": "my_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "q",
        "doc_to_choice": "a",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_choices.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (result,) = run_benchmarks(STORIES, ["my_choices"], include=tmp_path / "mine")
    likelihoods = [[log_likelihood(q, f" {answer}") for answer in answers] for q, answers, _ in asked]
    expected = [own.index(max(own)) == right for own, (_, _, right) in zip(likelihoods, asked, strict=True)]
    assert (result.task, result.value, result.documents) == ("my_choices", sum(expected) / 2, 2)
    (tmp_path / "mine" / "my_choices.yaml").write_text("task: my_choices\ndoc_to_text: !function none.here\n")
    with pytest.raises(ConfigError, match="--tasks my_choices: ") as fault:
        run_benchmarks(STORIES, ["my_choices"], include=tmp_path / "mine")
    assert "\n" not in str(fault.value)
    with pytest.raises(DataError, match=r"expected a folder with lm-eval's task files"):
        run_benchmarks(STORIES, ["my_choices"], include=tmp_path / "none")


def test_own_tasks_and_local_files_exclude_each_other(files):
    done = run_main("evaluate.py", "--model", STORIES, "--tasks", "arc_easy", "--data", files, "--include-path", files)
    assert done.returncode == 2
    assert "--include-path: its tasks name their own documents" in done.stderr
