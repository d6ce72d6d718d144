"""What a run would refuse, its dry run reports: each change is made to a run that has begun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from pipeline.checkpoint.manifest import CheckpointManifest, LayoutRecord, describe_run
from pipeline.checkpoint.position import Position
from pipeline.checks import checklist, input_checks
from pipeline.checks.checklist import check_stage
from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.checks.inputs import RunInputs
from pipeline.commands import train
from pipeline.config.run import load_config
from pipeline.data.dataset.samples import check_predicts
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.extension import Extension
from pipeline.methods.build_model import build_model
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import SINGLE
from pipeline.run_folder.lock import RunLock
from pipeline.sizing.cluster import Cluster
from tests.programs import call, scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import make_run, make_tokens, tokenize_corpora, write_config


def test_a_dry_run_makes_every_check_of_the_stages():
    # Before corpora and checkpoints exist, there is a check in place of the one of training.
    before_they_exist = {
        input_checks.check_samples: input_checks.check_samples_or_folder,
        input_checks.check_start: input_checks.check_newest_checkpoint,
    }
    for check in (*checklist.input_checks("tokenize"), *checklist.input_checks("train")):
        assert before_they_exist.get(check, check) in checklist.input_checks("dry run"), (
            check.__name__
        )


def test_checks_of_every_stage_come_before_the_base_is_opened_and_once(monkeypatch):
    def check_of_all(inputs: RunInputs) -> None:
        """Nothing."""

    class ForAll(Extension):
        name = "for_all"

        def input_checks(self, stage):
            return [check_of_all]

    monkeypatch.setattr(checklist, "extensions", lambda: (ForAll(),))
    for stage in ("tokenize", "train", "dry run"):
        checks = checklist.input_checks(stage)
        assert checks.count(check_of_all) == 1
        assert checks[: checks.index(check_of_all)] == list(checklist._CONFIG_CHECKS)


def test_every_check_is_used_and_says_what_it_checks():
    used = {
        *checklist.input_checks("tokenize"),
        *checklist.input_checks("train"),
        *checklist.input_checks("dry run"),
    }
    for check in (*used, *checklist.PREFLIGHT_CHECKS):
        assert check.__doc__, check.__name__
    for name, function in vars(input_checks).items():
        if name.startswith("check_") and function.__module__ == input_checks.__name__:
            assert function in used, name


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> tuple[Path, Path]:
    """A run with tokens, an expansion, and the manifest alone of a checkpoint after one step."""
    run, tokens = tmp_path_factory.mktemp("run"), make_tokens(tmp_path_factory.mktemp("tokens"))
    config = load_config(make_run(run, tokens))
    base = open_base(config.base)
    fingerprint = load_tokenizer(config.base).fingerprint
    checkpoint = run / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    CheckpointManifest(
        run=describe_run(config, base, build_model(config, base.spec, SINGLE), fingerprint),
        position=Position(step=1),
        layout=LayoutRecord(world_size=2, tp_size=1, dp_size=2, zero_stage=3, dtype="float32"),
        versions={},
        files={},
    ).save(checkpoint)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    return run, tokens


def reported(config: Path, capsys) -> tuple[int, list[str]]:
    """The exit code of a dry run, and the faults that it prints."""
    code = call(train, "--dry-run", "--gpus", 2, "--gpus-per-node", 2, config)
    faults = capsys.readouterr().out.partition("\nerrors")[2].splitlines()
    return code, [fault.strip() for fault in faults if fault.strip() != "none found"]


def test_nothing_stops_the_run_as_it_began(begun, capsys):
    run, tokens = begun
    before = sorted(path for folder in begun for path in folder.rglob("*"))
    assert reported(write_config(run, tokens), capsys) == (0, [])
    for_model_card = write_config(run, tokens, data__corpora__korean__source={"license": "cc0-1.0"})
    assert reported(for_model_card, capsys) == (0, [])
    write_config(run, tokens)
    assert sorted(path for folder in begun for path in folder.rglob("*")) == before


def test_a_refused_setting_is_told_before_the_finished_stages_are_walked(begun):
    """By the first stage of the job; and a run that goes on as it was waits for no torch there."""
    run, tokens = begun
    config = write_config(run, tokens)
    refused = scale_cpt("tokenize", config, "--set", "method.router_threshold=0.25")
    assert refused.returncode != 0
    assert "another method.router_threshold (expected 0.5, found 0.25)" in refused.stderr
    assert scale_cpt("tokenize", config, "--set", "schedule.steps=7").returncode == 0
    with patch.object(checklist, "check_stage", side_effect=AssertionError("not without need")):
        assert scale_cpt("tokenize", config).returncode == 0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"schedule__global_batch_size": 16},
            "another schedule.global_batch_size (expected 8, found 16)",
        ),
        ({"data__sequence_length": 16}, "another data.sequence_length (expected 32, found 16)"),
        ({"method__expansion__hidden_size": 24}, "initial_expansion: made with another method"),
        (
            {"method__router_threshold": 0.25},
            "another method.router_threshold (expected 0.5, found 0.25)",
        ),
        (
            {"data__corpora__korean__input": [str(STORIES_HELDOUT)]},
            "korean: was begun with other files: expected",
        ),
        ({"data__corpora__korean__input": ["none.jsonl"]}, "none.jsonl: no such file"),
        (
            {"data__corpora__korean": {"input": [str(REVIEWS_HELDOUT)], "heldout_fraction": 0.5}},
            "another heldout fraction",
        ),
        ({"data__corpora__korean__text_key": "body"}, "another text key"),
        ({"method__l_fp": 99}, "l_fp"),
        (
            {"schedule__learning_rate_factors": {"router": 2.0}},
            "schedule.learning_rate_factors: 'router' matches no parameter that trains",
        ),
        (
            {"schedule__weight_decay_factors": {"layers.99.*": 0.0}},
            "schedule.weight_decay_factors: 'layers.99.*' matches no parameter that trains",
        ),
        ({"init_expansion": "none"}, "init_expansion: none: holds no expansion"),
        (
            {
                "data__corpora": {"korean": {"input": [str(REVIEWS_HELDOUT)]}},
                "data__replay_fraction": 0.0,
            },
            "none has held-out text to score",
        ),
        ({"folder": str(REVIEWS_HELDOUT / "run")}, "is no folder"),
    ],
)
def test_a_change_that_the_run_refuses_is_reported(begun, capsys, changes, fault):
    run, tokens = begun
    code, faults = reported(write_config(run, tokens, name="changed.yaml", **changes), capsys)
    assert code == 1
    assert any(fault in found for found in faults), faults


def test_training_refuses_a_factor_before_it_loads_a_model(begun):
    run, tokens = begun
    with pytest.raises(ConfigError, match="'router' matches no parameter that trains"):
        check_stage(
            load_config(write_config(run, tokens), ["schedule.learning_rate_factors={router: 2}"]),
            2,
            "train",
        )


def test_training_refuses_what_may_not_change_in_a_run_that_has_begun(begun):
    run, tokens = begun
    path = write_config(run, tokens)
    for changes in (["seed=7"], ["data.sequence_length=16"], ["method.name=lora", "method.rank=2"]):
        with pytest.raises(CheckpointError, match="step_00000001: was trained with another"):
            check_stage(load_config(path, changes), 2, "train")


def test_a_run_folder_that_is_locked_or_cannot_be_written(begun, capsys, monkeypatch):
    run, tokens = begun
    config = write_config(run, tokens)
    with RunLock(run):
        monkeypatch.setattr(
            "pipeline.run_folder.lock.os.getpid", lambda: 1
        )  # another process looks
        code, faults = reported(config, capsys)
    assert code == 1
    assert "is at the stage training in this folder" in faults[0]
    monkeypatch.undo()
    monkeypatch.setattr("pipeline.run_folder.lock.os.access", lambda *_: False)
    code, faults = reported(config, capsys)
    assert code == 1
    assert "cannot be written to" in faults[0]


@pytest.mark.parametrize(
    ("changes", "export", "gate"),
    [
        ({}, "scale, expansion; not merged: method.norm separate", False),
        ({"method__norm": "base"}, "merged, scale, expansion", False),
        ({"method__norm": "base", "gate": {}}, "not merged: a gate decides for each token", True),
        (
            {"method": {"name": "lora", "rank": 2}},
            "merged, peft; not scale: method lora widens nothing",
            False,
        ),
    ],
)
def test_the_plan_names_the_formats_and_the_stages(begun, changes, export, gate):
    run, tokens = begun
    plan = make_plan(
        load_config(write_config(run, tokens, name="changed.yaml", **changes)), Cluster(2, 2)
    )
    rows = dict(plan.rows)
    assert export in rows["export"]
    assert ("gate" in rows["job stages"]) == gate
    assert rows["serving"].startswith("a merged export") == export.startswith("merged")


def test_the_plan_of_a_run_in_stages_has_the_groups_and_the_batch_of_each(begun):
    run, tokens = begun
    stages = [
        {"name": "norms", "steps": 2, "trains": "norm", "learning_rate": 0.5},
        {"name": "all", "steps": 4, "global_batch_size": 16},
    ]
    config = load_config(write_config(run, tokens, name="changed.yaml", stages=stages))
    plan = make_plan(config, Cluster(2, 2))
    of_norms = [group for group in plan.figures["groups"] if group["stage"] == "norms"]
    assert {group["key"] for group in of_norms} == {"norm"}
    assert {group["learning_rate"] for group in of_norms} == {0.5}
    of_all = [group for group in plan.figures["groups"] if group["stage"] == "all"]
    assert {"norm", "expansion_to_base"} < {group["key"] for group in of_all}
    assert {group["learning_rate"] for group in of_all} == {2e-3}
    texts = [text for name, text in plan.rows if name == "groups"]
    assert any(text.startswith("norms: norm ") for text in texts)
    rows = dict(plan.rows)
    assert rows["batch"] == "512 tokens a step, 4 micro-batches a rank, in stage all"
    assert "scale-cpt train --ranks 2;" in rows["launch"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "transformers and, on one rank, vLLM run .* is not possible: method.norm"),
        ({"gate": {"features": "token"}}, "transformers and, on one rank, vLLM run format scale;"),
        ({"gate": {}}, "transformers runs format scale, vLLM does not: it has a running mean"),
        ({"gate": {"features": "token", "layer": 4}}, ".* vLLM does not: .* layers that run twice"),
        (
            {"gate": {"features": "token"}, "method__open_rows": {}},
            "transformers and, on one rank, vLLM run format scale;",
        ),
        (
            {"gate": {}, "method": {"name": "fft"}},
            "transformers runs format difference, vLLM does not; .* a gate decides for each token",
        ),
    ],
)
def test_the_plan_says_what_runs_an_export_that_is_not_merged(begun, changes, reason):
    run, tokens = begun
    path = write_config(run, tokens, name="changed.yaml", **changes)
    rows = dict(make_plan(load_config(path), Cluster(2, 2)).rows)
    assert re.match(reason, rows["serving"]), rows["serving"]


@pytest.mark.parametrize("command", ["tokenize", "upscale"])
def test_a_restart_passes_the_stages_before_training_without_torch(begun, command):
    path = str(write_config(*begun))
    code = (
        f"import sys; from pipeline import cli; sys.argv = ['scale-cpt', {command!r}, {path!r}]\n"
    )
    code += "try: cli.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr


def pairs(file: Path, prompt: str, count: int = 12) -> Path:
    """Records of a prompt and an answer."""
    lines: list[str] = []
    for number in range(count):
        lines.append(json.dumps({"question": f"{prompt} {number}", "text": "The dog was happy."}))
    file.write_text("\n".join(lines))
    return file


LONG = "Once upon a time there was a little dog who liked to play in the park. " * 20


def test_a_held_out_part_that_predicts_nothing_is_refused_at_the_start(tmp_path, capsys):
    short = pairs(tmp_path / "short.jsonl", "Who was it?")
    heldout = pairs(tmp_path / "long.jsonl", LONG)
    corpus = {"input": [str(short)], "heldout_input": [str(heldout)], "prompt_key": "question"}
    settings = {"data__corpora": {"pairs": corpus}, "data__replay_fraction": 0}

    def config(**changes: int) -> Path:
        return make_run(tmp_path / "run", tmp_path / "tokens", **settings, **changes)

    # The order of the samples is fixed: the first one of these holds no answer.
    path = config(validation__max_sequences=1)
    tokenize_corpora(load_config(path))
    with pytest.raises(DataError) as refusal:
        check_stage(load_config(path), 1, "train")
    message = str(refusal.value)
    assert re.search(
        r"pairs\.heldout: the held-out part of data\.corpora\.pairs predicts no token in the sequ"
        r"ences that are scored \(1 of \d+\): .* prompts that fill all 32 tokens .*; raise data\.s",
        message,
    )
    assert reported(path, capsys) == (1, [message])

    # Both remedies hold.
    check_stage(load_config(config(validation__max_sequences=1000)), 1, "train")
    longer = {"data__sequence_length": 512, "validation__max_sequences": 1}
    check_stage(load_config(config(**longer)), 1, "train")


def test_a_corpus_that_trains_nothing_is_refused_at_the_start(tmp_path):
    short = pairs(tmp_path / "short.jsonl", "Who was it?")
    corpus = {"input": [str(short)], "prompt_key": "question"}
    path = make_run(
        tmp_path / "run",
        tmp_path / "tokens",
        data__corpora={"pairs": corpus},
        data__replay_fraction=0,
    )
    tokenize_corpora(load_config(path))
    inputs = RunInputs(load_config(path), 1)
    assert inputs.samples.training
    whole = inputs.samples.training[0].samples.corpora["pairs"]

    def all_prompt(start: int, stop: int) -> object:
        return np.ones(stop - start, dtype=bool)

    with (
        patch.object(whole.source, "prompt_mask", all_prompt),
        pytest.raises(DataError, match=r"no sequence of data\.corpora\.pairs predicts a token"),
    ):
        check_predicts(inputs.samples.training, {}, 1)
