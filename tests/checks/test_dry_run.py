"""The plan of a dry run, compared with what the run then does; and the errors that it finds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.checks.dry_run.run_plan import RunPlan
from pipeline.config.run import load_config
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.extension.vocabulary import learn_extension, write_extension
from pipeline.expansion_folder import open_expansion
from pipeline.files.disk_space import held_bytes
from pipeline.methods.registry import training_method
from pipeline.sizing.cluster import Cluster
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.extensions.self_generated.helpers import copied_stories
from tests.files import read_jsonl
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import make_run, tokenize_corpora, train, write_config

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
WORLD = Cluster(gpus=2, gpus_per_node=2)


def plan_of(config: Path, cluster: Cluster = WORLD) -> RunPlan:
    return make_plan(load_config(config), cluster)


def numbers(plan: RunPlan, row: str) -> list[float]:
    """Those in the texts of a row."""
    texts = " ".join(text for name, text in plan.rows if name == row)
    return [
        float(found.replace(",", ""))
        for found in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", texts)
    ]


def test_the_plan_is_what_the_run_does(tokens, tmp_path):
    wide = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8}
    changes = {"method__expansion": wide, "schedule__steps": 4, "checkpoints__every_steps": 3}
    config = make_run(tmp_path, tokens, **changes, checkpoints__keep_last=5)
    plan = plan_of(config)
    assert plan.faults == plan.to_make == []
    assert "dp 2, " in dict(plan.rows)["layout"] and " for 4 steps, " in dict(plan.rows)["duration"]

    assert run_ranks(train, 2, config) == [0, 0]
    written, gb_each, at_once, gb_needed, _ = numbers(plan, "checkpoints")
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == written == 2
    # Without random states, names and padding, which matter in so small a model.
    assert gb_each * 1e9 == pytest.approx(
        held_bytes(tmp_path / "checkpoints/step_00000004"), rel=0.1
    )
    assert at_once == 6
    assert gb_needed == pytest.approx(6 * 1.1 * gb_each, rel=0.01)
    assert numbers(plan, "validation")[0] == sum("perplexity/korean" in line for line in lines)
    done = json.loads((tmp_path / "training.json").read_text())
    assert f"trained {done['trainable_parameters']:,} " in dict(plan.rows)["parameters"]
    assert numbers(plan, "steps") == [4, done["tokens_seen"]]


def test_the_plan_names_the_kernels_of_attention(tokens, tmp_path):
    """FlashAttention 4 is not installed where the tests run, so that asking for it is a fault."""
    path = write_config(tmp_path, tokens)
    gpus = Cluster(gpus=1)
    row = dict(make_plan(load_config(path), gpus).rows)["attention"]
    assert row.startswith("torch's kernels: ") and "\n" not in row
    on_cpus = make_plan(load_config(path), replace(gpus, on_cpu=True, peak_tflops=1.0))
    assert "attention" not in dict(on_cpus.rows)
    changes = ["flash_attention=fa4", "deepspeed=ds_configs/zero1.json"]
    (fault,) = make_plan(load_config(path, changes), gpus).faults
    assert fault.startswith("flash_attention: fa4: flash-attn-4 is not installed; pip install")


def test_own_rows_are_bounded_until_they_are_counted(tokens, tmp_path):
    own = {"open_rows": {"min_count": 5}, "open_gains": True, "low_rank": 2}
    changes = {f"method__{name}": value for name, value in own.items()}
    plain = plan_of(make_run(tmp_path / "plain", tokens, gate={}))
    bound = plan_of(write_config(tmp_path / "run", tokens, gate={}, **changes))
    counted = plan_of(make_run(tmp_path / "run", tokens, gate={}, **changes))
    texts = [text for name, text in bound.rows if name == "parameters"]
    assert "an upper bound, with open rows of all tokens" in texts[1]
    assert "an upper bound" not in str(counted)

    expansion = open_expansion(tmp_path / "run" / "initial_expansion")
    assert expansion.manifest.own_tokens is not None
    rows = len(expansion.manifest.own_tokens) + 1
    of_all = 512 + 1
    trained = [numbers(plan, "parameters")[2] for plan in (plain, counted, bound)]
    assert trained[0] < trained[1] < trained[2]
    # Of the input and of the output, each as wide as the base.
    assert trained[2] - trained[1] == 2 * 64 * (of_all - rows)
    sizes = []
    for name in expansion.names:
        with safe_open(expansion.path / expansion.manifest.tensors[name], "pt") as file:
            sizes.append(math.prod(file.get_slice(name).get_shape()))
    assert trained[1] == sum(sizes)


def test_lora_trains_the_rows_of_an_extended_vocabulary_beside_its_adapters(tmp_path):
    """The base's embedding and output are two matrices of 64 columns each."""
    vocabulary = tmp_path / "vocabulary"
    new, old = (list(texts([str(file)])) for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    learned = learn_extension(STORIES, new[:20], old, add=11, min_uses=5)
    write_extension(learned, vocabulary, lambda _: None)
    settings = {"method": {"name": "lora", "rank": 2}}
    plain = plan_of(write_config(tmp_path / "plain", tmp_path / "tokens", **settings))
    settings["vocabulary"] = {"folder": str(vocabulary)}
    path = write_config(tmp_path / "run", tmp_path / "tokens", **settings)
    tokenize_corpora(load_config(path))
    plan = plan_of(path)
    assert plan.faults == plan.to_make == []
    trained = [numbers(one, "parameters")[2] for one in (plain, plan)]
    assert trained[1] - trained[0] == 2 * 11 * 64

    assert run_ranks(train, 2, path) == [0, 0]
    done = json.loads((tmp_path / "run" / "training.json").read_text())
    assert done["trainable_parameters"] == trained[1]


def test_the_plan_says_that_experts_have_no_low_rank_differences(base, tmp_path):
    config = load_config(
        write_config(tmp_path, tmp_path, method__l_fp=2, method__low_rank=2, gate={})
    )
    method = training_method(config)
    [(name, text)] = method.dry_run_rows(base("mixtral").spec)
    assert name == "open weights" and "but the experts', which stay the base's" in text
    assert not list(method.dry_run_rows(base("llama").spec))


def test_the_disk_space_counts_what_every_stage_writes(tokens, tmp_path):
    needed = plan_of(write_config(tmp_path / "fresh", tmp_path / "none"))
    made = make_run(tmp_path / "made", tokens)
    text = next(text for name, text in needed.rows if name == "disk space")
    found = {kind: 1e9 * float(gb) for kind, gb in re.findall(r"(\w+) ([\d.e-]+)(?:,|$)", text)}
    assert found.keys() == {"tokens", "expansion", "checkpoints", "export"}
    assert found["tokens"] == pytest.approx(held_bytes(tokens), rel=0.15)
    assert found["expansion"] == pytest.approx(
        held_bytes(tmp_path / "made" / "initial_expansion"), rel=0.1
    )
    assert found["export"] > 2 * 260_000 and numbers(needed, "disk space")[
        0
    ] * 1e9 == pytest.approx(sum(found.values()), rel=0.02)
    after = next(text for name, text in plan_of(made).rows if name == "disk space")
    assert "tokens 0, " in after and "expansion 0, " in after


def test_a_disk_without_room_for_all_that_is_written_is_a_fault(small_disk, tmp_path):
    disk = small_disk(mib=3)
    few = {"checkpoints__keep_last": 1, "stability__max_rollbacks": 0}
    (fault,) = plan_of(write_config(disk.path / "run", disk.path / "tokens", **few)).faults
    assert (
        "tokens, expansion, checkpoints and export need about " in fault
        and "GB more, found 0.0031" in fault
    )


def test_epochs_match_the_samples(tokens, tmp_path):
    plan = plan_of(make_run(tmp_path, tokens, schedule__steps=50))
    for name, drawn in {
        "korean": 0.75 * 400,
        "english": 0.25 * 400,
    }.items():  # of 50 steps of 8 samples
        corpus_tokens, epochs = numbers(plan, f"corpus {name}")
        samples = -(-corpus_tokens // 32)
        assert epochs == pytest.approx(drawn / samples, abs=1.5 / samples + 0.005 * epochs)
    assert "sequences: 5 of english, 5 of korean" in dict(plan.rows)["validation"]
    rows = dict(plan_of(write_config(tmp_path, tokens, data__replay_fraction=0.0)).rows)
    assert rows["corpus english"].endswith(", not read") and rows["corpus korean"].endswith(
        " epochs"
    )


def test_what_earlier_stages_make_is_not_a_fault(tmp_path):
    plan = plan_of(write_config(tmp_path, tmp_path / "none"))
    assert plan.faults == []
    assert [line.rpartition("(")[2] for line in plan.to_make] == [
        "scale-cpt tokenize)",
        "scale-cpt upscale)",
    ]
    assert dict(plan.rows)["corpus korean"] == "new, not made yet"


def test_what_the_machine_has_no_room_for(tokens, tmp_path):
    (disk,) = plan_of(write_config(tmp_path, tokens, checkpoints__keep_last=10**9)).faults
    (memory,) = plan_of(write_config(tmp_path, tokens), Cluster(2, 2, gpu_memory_gib=0.001)).faults
    assert "GB more, found" in disk and "memory: a rank needs " in memory


def test_on_a_machine_without_gpus_it_plans_processes_and_measures_their_speed(tmp_path):
    places = (f"--set=folder={tmp_path}", f"--set=data.folder={tmp_path / 'tokens'}")
    done = scale_cpt("train", "--dry-run", ROOT / "configs" / "demo.yaml", *places)
    assert done.returncode == 0, done.stderr
    assert (
        "2 CPU processes on 1 node(s): dp 2, ZeRO-3 x tp 1" in done.stdout
        and "GPU" not in done.stdout
    )
    assert re.search(r"duration +0:0\d:\d\d for \d+ steps, .* measured here", done.stdout)
    assert "none found" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_base_that_is_not_downloaded():
    described = ["--base-config", ROOT / "configs" / "bases" / "llama-3.2-1b.json"]
    run = ROOT / "configs" / "cpt_korean_llama3.2_1b.yaml"
    done = scale_cpt("train", "--dry-run", "--gpus", 8, *described, run)
    assert done.returncode == 1
    assert "models/Llama-3.2-1B: no such folder here" in done.stdout
    assert "base 1,235,814,400" in done.stdout and "59,999,518,720 tokens in all" in done.stdout
    assert "memory a rank" in done.stdout and "memory: a rank needs" not in done.stdout


def test_a_base_whose_autotokenizer_has_other_ids_is_named_with_an_example(tmp_path):
    base = copied_stories(tmp_path / "base", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    plan = plan_of(write_config(tmp_path / "run", tmp_path / "tokens", base=str(base)))
    row = dict(plan.rows)["tokenizer"]
    assert row.startswith(f"{base}: AutoTokenizer has other ids than") and " is [" in row
    assert not any("ids" in fault for fault in plan.faults)
    usual = dict(plan_of(write_config(tmp_path / "run", tmp_path / "tokens")).rows)["tokenizer"]
    assert usual == "the base's AutoTokenizer has the same ids on all texts that were compared"


def test_an_export_that_would_have_other_ids_is_an_error(tmp_path):
    base = copied_stories(tmp_path / "base", tokenizer_config={"pad_token": "[PAD]"})
    plan = plan_of(write_config(tmp_path / "run", tmp_path / "tokens", base=str(base)))
    assert any("an export would have other ids than training" in fault for fault in plan.faults)
