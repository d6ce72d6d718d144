"""The estimate of runs on hosted bases: counted on transformers' own code, without data."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import yaml

from benchmarks.recorded_steps import real_batch
from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.errors import LayoutError
from pipeline.extensions.first_config.propose import propose
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.extensions.hosted import base_attention
from pipeline.methods.build_model import build_model
from pipeline.model.bases import read_spec
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.flops import count_served_flops
from pipeline.sizing.live_memory import LiveMemory
from pipeline.sizing.meta_device import NotTracedError
from pipeline.sizing.micro_batch import measure_micro_batch
from tests.extensions.hosted.bases import hosted, opened, save_hosted
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import write_config

pytestmark = pytest.mark.full

# Documents apart by positions, by nothing; a mixture; latent attention; an attention of torch's.
KINDS = ["llama", "granite", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt2"]
CLOSE = 0.05
NEW, OLD = [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_hosted(kind, folder / kind) for kind in KINDS}


def _run(folder: Any, base: Any, **changes: Any) -> RunConfig:
    method = {
        "name": "scale",
        "variant": "adapt",
        "expansion": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4},
        "l_fp": 1,
        "collaborative_modules": "both",
    }
    settings = {"method": method, "base": str(base), "base_code": "transformers", **changes}
    return load_config(write_config(folder, folder, zero=1, **settings))


@pytest.mark.parametrize("recomputed", ["none", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_holds_what_is_estimated(kind, recomputed, bases, tmp_path, monkeypatch):
    base = opened(bases[kind])
    # A CPU's kernels for several documents in a row take masks, and copies of grouped heads, which
    # a GPU's do not. A base that gets a row for each document has neither.
    splits = base.spec.structure.documents == "one_document"
    monkeypatch.setattr(base_attention, "KERNEL_DEVICES", ("cpu", "meta"))
    config = _run(tmp_path, bases[kind], data__document_mask=splits)
    costs = measure_micro_batch(config, base.spec, 1, recomputed, torch.float32)
    model = hosted(base, expansion=config.method.expansion.model_dump(exclude_none=True))
    model.activation_checkpointing = recomputed
    model.train()
    live = LiveMemory(*model.parameters(), *model.buffers())
    held: list[int] = []
    handle = model.output.register_forward_pre_hook(lambda *_: held.append(live.now))
    tokens, targets, positions, documents = real_batch(config)
    with live:
        model(tokens, targets, positions, documents).total.backward()
    handle.remove()
    # For the added heads a CPU takes a mask all the same.
    mask = 0
    if documents is not None:
        mask = documents.ids.numel() * documents.ids.shape[1] * torch.float32.itemsize
    assert costs.activation_bytes == pytest.approx(held[0] - mask, rel=CLOSE)


def test_a_hosted_base_takes_the_products_of_a_native_one(bases, tmp_path):
    flops = {}
    for code in ("native", "transformers"):
        config = _run(tmp_path, bases["llama"], base_code=code)
        with torch.device("meta"):
            model = build_model(config, read_spec(bases["llama"], code), SINGLE)
        flops[code] = count_served_flops(model, 64, gate_layer=1).closed
    assert flops["transformers"] == flops["native"]


def test_experts_count_for_the_tokens_that_take_them(bases, tmp_path):
    """Two of six experts: a token takes their products, and those of the router."""
    config = _run(tmp_path, bases["qwen3_moe"])
    flops = {}
    for code in ("native", "transformers"):
        with torch.device("meta"):
            spec = read_spec(bases["qwen3_moe"], code)
            model = build_model(config.model_copy(update={"base_code": code}), spec, SINGLE)
        flops[code] = count_served_flops(model, 64, gate_layer=1).closed
    assert flops["transformers"] == pytest.approx(flops["native"], rel=CLOSE)


def test_a_first_configuration_and_its_dry_run(bases, tmp_path, monkeypatch):
    cluster = Cluster(1, on_cpu=True)
    config, text = propose(FirstRun("first", bases["qwen3_next"], NEW, OLD), cluster)
    assert parse_config(yaml.safe_load(text), source="text") == config
    assert "transformers computes this base (Qwen3NextForCausalLM)" in text
    assert config.gate is not None and config.method.l_fp == 2
    monkeypatch.chdir(tmp_path)
    plan = make_plan(config, cluster)
    assert plan.faults == []
    rows = dict(plan.rows)
    assert plan.figures["layout"]["fits"] == "yes"
    assert "micro-batch" in rows["batch"] and "?" not in rows["batch"]
    described = [text for name, text in plan.rows if name == "base"]
    assert "linear_attn (mixer)" in described[0] and "a row of its own" in described[0]
    assert "each rank loads it whole" in described[1]


def test_a_smaller_memory_takes_smaller_micro_batches(bases):
    sizes = []
    for gib in (4.0, 0.02):
        cluster = Cluster(1, gpu_memory_gib=gib, on_cpu=True)
        config, _ = propose(FirstRun("first", bases["granite"], NEW, OLD), cluster)
        sizes.append(config.schedule.micro_batch_size)
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(("kind", "precision"), [("granite", ""), ("ernie4_5_moe", "_fp32")])
def test_a_base_with_parameters_in_fp32_gets_a_run_in_fp32(kind, precision, tmp_path):
    base = save_hosted(kind, tmp_path / "base")
    cluster = Cluster(1)
    config, text = propose(FirstRun("first", base, NEW, OLD), cluster)
    assert config.deepspeed.name == f"zero1{precision}.json"
    assert ("transformers keeps model.layers.1.mlp.gate.weight in fp32" in text) == bool(precision)
    assert make_plan(config, cluster).faults == []
    in_16_bits = config.model_copy(update={"deepspeed": config.deepspeed.with_name("zero1.json")})
    faults = make_plan(in_16_bits, cluster).faults
    expected = "deepspeed: expected fp32 .* keeps model.layers.1.mlp.gate.weight in fp32, found bf"
    assert [bool(re.match(expected, fault)) for fault in faults] == [True] * bool(precision)


def test_a_base_for_which_no_layout_is_small_enough_is_refused_for_its_memory(bases):
    """After layers that are recomputed, of which a hosted base keeps nothing."""
    cluster = Cluster(1, gpu_memory_gib=0.001)
    with pytest.raises(
        LayoutError, match=r"memory: this base does not fit on 1 GPUs of 0\.001 GiB"
    ):
        propose(FirstRun("first", bases["granite"], NEW, OLD), cluster)


def test_the_commands_take_a_hosted_base(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init = ("config", "init", "--base", bases["granite"], "--new", *NEW, "--old", *OLD)
    done = scale_cpt(*init, "--gpus", 1)
    assert done.returncode == 0, done.stderr
    assert "hosted: GraniteForCausalLM" in done.stdout and "none found" in done.stdout
    assert load_config(tmp_path / "granite.yaml").gate is not None
    done = scale_cpt("estimate", "granite.yaml", "--gpus", 1)
    assert done.returncode == 0, done.stderr
    assert "recommended: ZeRO-1 x tp 1" in done.stdout


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, IndexError])
def test_code_that_does_not_run_without_data_is_said_so(kind, bases, tmp_path, monkeypatch):
    config = _run(tmp_path, bases["llama"])
    # Before the code fails: it also runs where the structure is found.
    estimator = open_estimator(config, Cluster(1, on_cpu=True))

    def fails(*_: Any, **__: Any) -> None:
        raise kind("Tensor.item() cannot be called on meta tensors\nmore")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", fails)
    with pytest.raises(NotTracedError, match=r"memory and time of a llama .*data: .*meta tensors"):
        estimator.memory(estimator.own_choice)
    plan = make_plan(config, Cluster(1, on_cpu=True))
    assert "are not estimated" in dict(plan.rows)["memory a rank"]
    assert not any("estimated" in fault for fault in plan.faults)
