"""The benchmark of a training step, and the check of a machine with a GPU, rehearsed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu import __main__ as parts
from benchmarks.gpu.setting import Setting
from benchmarks.gpu_step import Contender, Shape, Variant
from benchmarks.results import ROOT
from tests.benchmarks.calls import rows_of

pytestmark = pytest.mark.full

# What a quantised base is off by says nothing about exactness; memory is measured on a GPU.
NOT_JUDGED = ("transformers in fp32", "without scores of all pairs")


def rows_of_part(part, folder):
    return {row.check: row for row in parts.rows_of(part, Setting("cpu", folder, 60.0))}


def test_no_part_needs_deepspeed_to_begin():
    modules = {f"benchmarks.gpu.{module}" for module, *_ in parts.PARTS.values()}
    program = f"import sys; sys.modules['deepspeed'] = None; import {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("part", ["parity", "attention"])
def test_exactness_holds_on_the_cpu(part, tmp_path):
    rows = rows_of_part(part, tmp_path)
    assert len(rows) >= 16
    assert [
        row
        for name, row in rows.items()
        if row.passed is not True and not name.endswith(NOT_JUDGED)
    ] == []


@pytest.mark.parametrize(
    ("part", "outcomes"),
    [
        ("exports", [None, True, None]),
        ("watchdog", [True, True]),
        ("memory", [None] * 16),
        ("step-1b-4096", [None] * 2),
    ],
)
def test_a_part_is_rehearsed(part, outcomes, tmp_path):
    assert [row.passed for row in rows_of_part(part, tmp_path).values()] == outcomes


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    return parts.main()


def test_a_part_that_takes_too_long_is_ended_and_what_was_found_is_kept(
    tmp_path, monkeypatch, capsys
):
    assert (
        call(
            monkeypatch,
            "--cpu",
            "--only",
            "attention",
            "--part-seconds",
            "0.5",
            "--output",
            str(tmp_path),
        )
        == 1
    )
    written = json.loads((tmp_path / "results.json").read_text())
    assert [row["check"] for row in written["rows"]] == ["ends in time"] and written["about"][
        "torch"
    ]
    assert "1 parts rehearsed: 0 checks passed, 1 failed" in capsys.readouterr().out


CPU = torch.device("cpu")


def test_every_variant_is_measured(tmp_path, monkeypatch, capsys):
    arguments = [
        "--cpu",
        "--tiny",
        "--shape",
        "1b-8192",
        "--threads",
        1,
        "--rounds",
        1,
        "--steps",
        1,
    ]
    rows = {row["variant"]: row for row in rows_of(gpu_step, tmp_path, monkeypatch, *arguments)}
    assert list(rows) == [str(variant) for variant in gpu_step.all_variants(compiled=True)]
    assert {*gpu_step.OURS, *gpu_step.THEIRS, "adapt + compile"} <= set(rows)
    assert {"preserve + fp8", "adapt + nf4", "lora + nf4 + compile"} <= set(rows)
    missing = ", ".join(
        name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None
    )
    lacking = {f"{name} + liger": f"needs {missing}" for name in gpu_step.THEIRS} if missing else {}
    assert {
        name: row["outcome"] for name, row in rows.items() if row["outcome"] != "measured"
    } == lacking
    assert all(row["tokens_per_second"] > 0 for name, row in rows.items() if name not in lacking)
    assert not any("peak_memory_gib" in row for row in rows.values()), "measured on a GPU only"
    assert rows["fft"]["ratio_to_fft"] == rows["peft_lora"]["ratio_to_peft_lora"] == 1
    assert (
        rows["preserve"]["flops_per_token"]
        < rows["adapt"]["flops_per_token"]
        < rows["fft"]["flops_per_token"]
    )
    assert rows["lora"]["trained_parameters"] == rows["peft_lora"]["trained_parameters"]
    assert rows["fft"]["trained_parameters"] == rows["transformers_fft"]["trained_parameters"]
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(rows)


@pytest.mark.parametrize("method", ["fft", "preserve", "transformers_fft"])
def test_a_mixture_of_experts_takes_a_turn(method):
    shape = Shape(gpu_step.SHAPES["moe-96m"].architecture.with_name("qwen3-moe-3m.json"), 1, 16, 4)
    contender = Contender(Variant(method), shape, CPU, torch.float32)
    contender.turn(1)
    assert contender.row()["outcome"] == "measured"
