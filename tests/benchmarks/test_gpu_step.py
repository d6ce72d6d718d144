"""The benchmark of a training step runs at its smallest size, and counts what it should."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_step import Contender, Shape, Variant
from tests.benchmarks.calls import rows_of

CPU = torch.device("cpu")


def test_every_variant_is_measured(tmp_path, monkeypatch, capsys):
    arguments = ["--cpu", "--tiny", "--shape", "1b-8192", "--threads", 1, "--rounds", 1, "--steps", 1]
    rows = {row["variant"]: row for row in rows_of(gpu_step, tmp_path, monkeypatch, *arguments)}
    assert list(rows) == [str(variant) for variant in gpu_step.all_variants(compiled=True)]
    assert {*gpu_step.OURS, *gpu_step.THEIRS, "adapt + compile"} <= set(rows)
    assert {"preserve + fp8", "adapt + nf4", "lora + nf4 + compile"} <= set(rows)
    missing = ", ".join(name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None)
    lacking = {f"{name} + liger": f"needs {missing}" for name in gpu_step.THEIRS} if missing else {}
    assert {name: row["outcome"] for name, row in rows.items() if row["outcome"] != "measured"} == lacking
    assert all(row["tokens_per_second"] > 0 for name, row in rows.items() if name not in lacking)
    assert not any("peak_memory_gib" in row for row in rows.values()), "measured on a GPU only"
    assert rows["fft"]["ratio_to_fft"] == rows["peft_lora"]["ratio_to_peft_lora"] == 1
    assert rows["preserve"]["flops_per_token"] < rows["adapt"]["flops_per_token"] < rows["fft"]["flops_per_token"]
    assert rows["lora"]["trained_parameters"] == rows["peft_lora"]["trained_parameters"]
    assert rows["fft"]["trained_parameters"] == rows["transformers_fft"]["trained_parameters"]
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(rows)


@pytest.mark.parametrize("method", ["fft", "preserve", "transformers_fft"])
def test_a_mixture_of_experts_takes_a_turn(method):
    shape = Shape(gpu_step.SHAPES["moe-96m"].architecture.with_name("qwen3-moe-3m.json"), 1, 16, 4)
    contender = Contender(Variant(method), shape, CPU, torch.float32)
    contender.turn(1)
    assert contender.row()["outcome"] == "measured"
