"""The plan of a dry run, compared with what the run then does; and the errors that it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.checks.plan import Plan, make_plan
from pipeline.config.run import load_config
from pipeline.sizing.cluster import Cluster
from tests.bases import save_stories_with_a_token_more
from tests.distributed import run_ranks
from tests.training.runs import make_run, make_tokens, train, write_config

ROOT = Path(__file__).parents[2]
WORLD = Cluster(gpus=2, gpus_per_node=2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def plan_of(config: Path, cluster: Cluster = WORLD) -> Plan:
    return make_plan(load_config(config), cluster)


def test_the_plan_is_what_the_run_does(tokens, tmp_path):
    config = make_run(tmp_path, tokens, schedule__steps=4, checkpoints__every_steps=3, checkpoints__keep_last=5)
    plan = plan_of(config)
    assert plan.faults == plan.to_make == ()
    assert plan.dp_size == 2
    assert plan.checkpoints is not None
    assert plan.estimate is not None
    assert plan.duration_s == 4 * plan.estimate.step_s

    assert run_ranks(train, 2, config) == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == plan.checkpoints.written == 2
    assert plan.validations == sum("perplexity/korean" in line for line in lines)
    done = json.loads((tmp_path / "training.json").read_text())
    assert plan.parameters is not None
    assert done["trainable_parameters"] == plan.parameters.trained
    assert done["tokens_seen"] == plan.steps * plan.tokens_per_step


def test_epochs_match_the_samples(tokens, tmp_path):
    plan = plan_of(make_run(tmp_path, tokens, schedule__steps=50))
    drawn = {"korean": 0.75 * 400, "english": 0.25 * 400}  # of 50 steps of 8 samples; off by one at most
    for corpus in plan.corpora:
        assert corpus.tokens is not None
        samples = -(-corpus.tokens // 32)
        assert corpus.epochs == pytest.approx(drawn[corpus.name] / samples, abs=1.5 / samples)
        assert corpus.validation_sequences == 5
    plan = plan_of(write_config(tmp_path, tokens, data__replay_fraction=0.0))
    assert {corpus.name: corpus.epochs == 0 for corpus in plan.corpora} == {"korean": False, "english": True}


def test_what_earlier_stages_make_is_not_a_fault(tmp_path):
    plan = plan_of(write_config(tmp_path, tmp_path / "none"))
    assert plan.faults == ()
    assert [line.rpartition("(")[2] for line in plan.to_make] == ["scale-cpt tokenize)", "scale-cpt upscale)"]
    assert [corpus.tokens for corpus in plan.corpora] == [None, None]


def test_every_fault_is_found(tokens, tmp_path):
    korean = {"input": ["none.jsonl"]}
    config = write_config(
        tmp_path,
        tmp_path / "none",
        data__sequence_length=1024,
        data__corpora={"korean": korean},
        data__replay_fraction=0.0,
        method__expansion={"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 3},
        schedule__global_batch_size=9,
    )
    text = "\n".join(plan_of(config).faults)
    assert "schedule.global_batch_size: 9 does not divide" in text
    assert "data.sequence_length: 1024 is beyond the base's context" in text
    assert "num_attention_heads" in text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"base": "none"}, "none/config.json: no such file"),
        ({"deepspeed": "none.json"}, "none.json: no such file"),
        ({"data__corpora__korean__token_budget": 320}, "use at most 1 steps"),
        ({"parallel__tp_size": 4}, "does not divide the world of 2 ranks"),
        ({"checkpoints__keep_last": 10**9}, "GB more, found"),
    ],
)
def test_a_single_fault(tokens, tmp_path, changes, fault):
    plan = plan_of(make_run(tmp_path, tokens) if not changes else write_config(tmp_path, tokens, **changes))
    (found,) = plan.faults
    assert fault in found


def test_a_tokenizer_with_more_ids_than_the_base_has_rows_is_found_before_tokenizing(tmp_path):
    base = save_stories_with_a_token_more(tmp_path / "base")
    (found,) = plan_of(write_config(tmp_path, tmp_path / "none", base=str(base))).faults
    assert "has ids up to 512, but the base's vocab_size is 512" in found


def test_missing_input_files(tmp_path):
    config = write_config(tmp_path, tmp_path / "none", data__corpora__korean__input=["none.jsonl"])
    (found,) = plan_of(config).faults
    assert found == "none.jsonl: no such file, and no file matches it as a pattern; give files, or a quoted pattern"


def test_a_gpu_that_is_too_small(tokens, tmp_path):
    config = write_config(tmp_path, tokens)
    (found,) = plan_of(config, Cluster(gpus=2, gpu_memory_gib=0.001)).faults
    assert found.startswith("memory: a rank needs ")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-m", "pipeline.train", "--dry-run", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_on_a_login_node(tmp_path):
    values = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    values["folder"] = str(tmp_path)
    values["data"]["folder"] = str(tmp_path / "tokens")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    done = command("--gpus", "2", str(config))
    assert done.returncode == 0, done.stderr
    assert "2 GPUs on 1 node(s): dp 2, ZeRO-3 x tp 1" in done.stdout
    assert "none found" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_on_a_machine_without_gpus_it_plans_processes_of_unknown_speed():
    plan = command("configs/demo.yaml").stdout
    assert "2 CPU processes on 1 node(s)" in plan and "GPU" not in plan
    assert " unknown on CPUs; scale-cpt status measures the first steps" in plan


def test_training_takes_no_options():
    program = [sys.executable, "-m", "pipeline.train", "--gpus", "2", "configs/demo.yaml"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "only --dry-run takes these options" in done.stderr


def test_a_base_that_is_not_downloaded():
    done = command(
        "--json",
        "--gpus",
        "8",
        "--base-config",
        "configs/bases/llama-3.2-1b.json",
        "configs/cpt_korean_llama3.2_1b.yaml",
    )
    assert done.returncode == 1
    plan = json.loads(done.stdout)
    assert plan["could_start"] is False
    assert any("models/Llama-3.2-1B: no such folder here" in fault for fault in plan["faults"])
    assert plan["parameters"]["base"] == 1_235_814_400
    assert plan["tokens"] == 59_999_518_720
    assert plan["checkpoints"]["bytes_each"] == plan["parameters"]["trained"] * 12
    assert plan["estimate"]["fits"]
