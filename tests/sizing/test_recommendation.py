"""Recommended layouts for the model sizes that the method was made for, and the command that prints
them."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.run import load_config, parse_config
from pipeline.errors import BaseModelError, ConfigError
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import GIB, USABLE_FRACTION, Cluster
from pipeline.sizing.estimate import Estimate, Estimator, open_estimator
from pipeline.sizing.layouts import RECOMPUTATIONS, Choice
from pipeline.sizing.recommendation import recommend
from pipeline.sizing.report import report
from pipeline.sizing.traffic import GATHER
from tests.bases import STORIES
from tests.programs import scale_cpt
from tests.sizing.real_runs import run_config

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
BASES = ROOT / "configs" / "bases"
WIDTHS = {  # a tenth on top of the base, and where W12 begins
    "llama-3.2-1b": ({"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}, 3),
    "llama-3.1-70b": (
        {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8},
        16,
    ),
}


def run_of(base: str, deepspeed: str = "zero3.json", **changes: Any):
    widths, l_fp = WIDTHS[base]
    values = {
        "name": base,
        "folder": "runs/x",
        "base": "elsewhere",
        "method": {"name": "scale", "variant": "adapt", "expansion": widths, "l_fp": l_fp},
        "data": {"folder": "tokens", "sequence_length": 2048, "corpora": {"new": {"input": ["a"]}}},
        "schedule": {
            "steps": 1000,
            "global_batch_size": 256,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "deepspeed": str(ROOT / "ds_configs" / deepspeed),
        **changes,
    }
    values["data"]["document_mask"] = False
    return parse_config(values, source="test")


@cache
def estimator(base: str, gpus: int) -> Estimator:
    return open_estimator(run_of(base), Cluster(gpus), base_config=BASES / f"{base}.json")


def states_gib(base: str, gpus: int, choice: Choice) -> float:
    """Weights, gradients and optimizer of a rank."""
    memory = estimator(base, gpus).estimate(choice).memory
    return (memory.weights + memory.gradients + memory.optimizer) / GIB


def test_a_70b_base_needs_sharding_and_replicas_of_it_do_not_fit():
    """Of 80 GiB: 2.2 N bytes replicated do not fit; 64 ZeRO-3 ranks need a few GiB, 8
    tensor-parallel ranks over 20."""
    choices = {stage: Choice(stage, 1, "none") for stage in (1, 3)}
    assert states_gib("llama-3.1-70b", 64, choices[1]) > 150
    assert 3 < states_gib("llama-3.1-70b", 64, choices[3]) < 6
    assert 20 < states_gib("llama-3.1-70b", 64, Choice(1, 8, "none")) < 30
    estimates = [estimator("llama-3.1-70b", 64).estimate(choice) for choice in choices.values()]
    choice, reason = recommend(estimates, Cluster(64))
    assert choice == choices[3] and "ZeRO-1 x tp 1 would need" in reason
    choice, reason = recommend(estimates[:1], Cluster(64))
    assert choice is None and reason.startswith("nothing fits: ZeRO-1 x tp 1 needs")


def test_layouts_are_the_same_whatever_the_run_has():
    """Experts over ranks are compared at every stage of ZeRO, also for a run without them."""
    source = BASES / "qwen3-30b-a3b.json"
    found = []
    for size in (1, 2):
        config = run_of("llama-3.2-1b", deepspeed="zero1.json", parallel={"expert_size": size})
        opened = open_estimator(config, Cluster(8), base_config=source)
        found.append(set(opened.choices()))
    assert found[0] == found[1]
    for stage in (1, 2, 3):
        sizes = {choice.expert_size for choice in found[0] if choice.zero_stage == stage}
        assert sizes == {1, 2, 4, 8}


def test_a_quantised_70b_base_takes_a_half_or_less():
    """Each element of the linear maps takes 8, or 4.5, of its 16 bits; the rest stays."""
    source = BASES / "llama-3.1-70b.json"
    weights = {}
    for precision, bytes_each in (("bf16", 2), ("fp8", 1), ("nf4", 4.5 / 8)):
        config = run_of("llama-3.1-70b", deepspeed="zero1.json", base_precision=precision)
        opened = open_estimator(config, Cluster(8), base_config=source)
        stages = {choice.zero_stage for choice in opened.choices()}
        assert stages == ({1, 2, 3} if precision == "bf16" else {1, 2})
        memory, _ = opened.memory(Choice(1, 8, "none"))
        weights[precision] = memory.weights
        ends = 2 * 128256 * 8192  # embedding and output projection
        quantised = weights["bf16"] - memory.weights
        assert quantised == pytest.approx((2 - bytes_each) * (70.554e9 - ends) / 8, rel=2e-3)
    with pytest.raises(
        ConfigError, match=r"base_precision: expected ZeRO-1 or 2, found ZeRO-3 in .*zero3.json"
    ):
        open_estimator(
            run_of("llama-3.1-70b", base_precision="nf4"), Cluster(8), base_config=source
        )


def test_a_1b_base_is_replicated_and_the_reason_names_what_that_saves():
    estimates = [
        estimator("llama-3.2-1b", 8).estimate(Choice(stage, 1, "none")) for stage in (1, 2, 3)
    ]
    choice, reason = recommend(estimates, Cluster(8))
    assert choice == Choice(1, 1, "none") and "ZeRO-3 would send" in reason
    gathers = {
        estimate.choice.zero_stage: next(
            sent.payload_bytes for sent in estimate.traffic if sent.purpose == GATHER
        )
        for estimate in estimates
    }
    assert gathers[1] == gathers[2]
    # 32 micro-batches gather the whole model, and the lower half twice: it is beyond DeepSpeed's
    # reuse distance of 1e9.
    whole = estimator("llama-3.2-1b", 8).parameters.total * 2
    assert 32 * whole < gathers[3] < 1.5 * 32 * whole


def with_usable(estimate: Estimate, spare: float) -> Cluster:
    """Eight GPUs of which `estimate` leaves that share of the usable memory."""
    usable_gib = estimate.memory.total / GIB / (1 - spare)
    return Cluster(8, gpu_memory_gib=usable_gib / USABLE_FRACTION)


def test_a_recommendation_leaves_the_error_of_the_estimate():
    whole, partitioned = (
        estimator("llama-3.2-1b", 8).estimate(Choice(stage, 1, "none")) for stage in (1, 2)
    )
    assert partitioned.memory.total < 0.94 * whole.memory.total
    tight = with_usable(whole, spare=0.03)
    assert whole.fits(tight) and not whole.is_safe(tight)
    assert recommend([whole, partitioned], tight)[0] == partitioned.choice
    choice, reason = recommend([whole], tight)
    assert choice is None and "which leaves less than the 5% that it may be wrong by" in reason
    assert recommend([whole, partitioned], with_usable(whole, spare=0.06))[0] == whole.choice


def small_estimator(folder: Path, cluster: Cluster, tp_size: int = 1) -> Estimator:
    """Of a run of a small base at ZeRO-1, which takes little time."""
    config = run_config(folder, "zero1", "adapt", Layout(cluster.gpus, tp_size))
    return open_estimator(config, cluster, base_config=STORIES / "config.json")


def rows_of(text: str) -> list[str]:
    """Those of a report's table."""
    return [line for line in text.splitlines() if re.match(r" +[123] +[1248] [nca]", line)]


def test_what_recomputes_more_than_it_must_is_neither_estimated_nor_listed(tmp_path):
    few, every = (small_estimator(tmp_path, Cluster(8)) for _ in range(2))
    (text, recommended), (whole, same) = report(few), report(every, every=True)
    assert recommended == same
    rows, all_rows = rows_of(text), rows_of(whole)
    layouts = [tuple(row.split()[:2]) for row in rows]
    assert set(rows) < set(all_rows) and len(all_rows) == len(RECOMPUTATIONS) * len(rows)
    assert len(set(layouts)) == len(layouts) and all(" none " in row for row in rows)
    assert max(map(len, [*text.splitlines(), *whole.splitlines()])) <= 100


def test_a_layout_of_the_run_that_does_not_fit_or_is_impossible_is_named_so(tmp_path):
    """The first has the least recomputation that fits in its row, and its own row because it is the
    run's."""
    opened = small_estimator(tmp_path, Cluster(8))
    total = opened.estimate(opened.own_choice).memory.total
    of_memory = {}
    for share in (0.97, 1.03):
        cluster = Cluster(8, gpu_memory_gib=total * share / USABLE_FRACTION / GIB)
        of_memory[share], _ = report(small_estimator(tmp_path, cluster))
    assert "ZeRO-1 x tp 1 (this run's): DOES NOT FIT, it needs " in of_memory[0.97]
    assert "ZeRO-1 x tp 1 (this run's): TIGHT" in of_memory[1.03]
    assert any(" tight " in row for row in rows_of(of_memory[1.03]))
    text, _ = report(small_estimator(tmp_path, Cluster(9, 9), tp_size=3))
    assert "ZeRO-1 x tp 3 (this run's): IMPOSSIBLE" in text


def test_only_messages_between_nodes_cross_the_network():
    one_node, many = (
        estimator("llama-3.2-1b", gpus).estimate(Choice(3, 1, "none")) for gpus in (8, 256)
    )
    assert one_node.between_bytes == 0 < one_node.inside_bytes
    assert many.between_bytes > 0
    # In a ring over nodes of eight, one edge in eight leaves the node.
    assert many.between_bytes == pytest.approx(many.inside_bytes / 7)
    assert many.compute_s == pytest.approx(one_node.compute_s / 32)
    halved = estimator("llama-3.2-1b", 8).estimate(Choice(1, 2, "none"))
    assert halved.between_bytes == 0
    whole = estimator("llama-3.2-1b", 8).estimate(Choice(1, 1, "none"))
    assert halved.memory.weights == pytest.approx(whole.memory.weights / 2, rel=0.01)


def test_what_is_offloaded_or_copied_is_in_the_hosts_memory():
    plain = estimator("llama-3.2-1b", 8).estimate(Choice(3, 1, "none"))
    offloaded, copied = (
        open_estimator(run, Cluster(8), base_config=BASES / "llama-3.2-1b.json").estimate(
            Choice(3, 1, "none")
        )
        for run in (
            run_of("llama-3.2-1b", deepspeed="zero3_offload.json"),
            run_of("llama-3.2-1b", checkpoints={"asynchronous": True}),
        )
    )
    assert offloaded.memory.weights == offloaded.memory.optimizer == plain.host_bytes == 0
    assert offloaded.host_bytes >= plain.memory.weights + plain.memory.optimizer
    assert copied.host_bytes >= plain.memory.optimizer > 0


def test_a_missing_base_that_the_project_describes_is_named_with_that_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("configs/cpt_korean_llama3.1_8b.yaml"))
    advice = r"name it with --base-config, such as configs/bases/llama-3\.1-8b\.json$"
    for base in ("nowhere/Llama-3.1-8B", "nowhere/Llama-3.1-8B-Instruct"):
        with pytest.raises(BaseModelError, match=advice):
            open_estimator(config.model_copy(update={"base": Path(base)}), Cluster(8))
    with pytest.raises(BaseModelError, match=r"name it with --base-config$"):
        open_estimator(config.model_copy(update={"base": Path("nowhere/mine")}), Cluster(8))


def test_the_command_prints_a_table(tmp_path):
    run_config(tmp_path, "zero1", "adapt", Layout(2), base="not/here")
    estimate = partial(scale_cpt, "estimate", tmp_path / "run.yaml", "--gpus")
    missing = estimate(2)
    assert (
        missing.returncode == 1
        and missing.stderr.count("\n") == 1
        and "--base-config" in missing.stderr
    )
    described = ("--base-config", STORIES / "config.json")
    text = estimate(2, *described, "--set", "parallel.tp_size=2").stdout
    assert (
        text.startswith("parameters  base 260,032, expansion ")
        and "ZeRO-1 x tp 2 (this run's" in text
    )
    assert "\nrecommended: ZeRO-1 x tp 1: " in text
    nothing = estimate(64, *described)  # more ranks than sequences in a batch
    assert nothing.returncode == 1 and "no layout is possible" in nothing.stdout
