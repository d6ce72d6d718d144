"""The check of a machine with a GPU, rehearsed: its parts, its limits, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as parts
from benchmarks.gpu.setting import ROOT, Setting
from pipeline.errors import ConfigError

# What a quantised base is off by says nothing about exactness; memory is measured on a GPU.
NOT_JUDGED = ("transformers in fp32", "without scores of all pairs")


def rows_of(part, folder):
    return {row.check: row for row in parts.rows_of(part, Setting("cpu", folder, 60.0))}


def test_no_part_needs_deepspeed_to_begin():
    modules = {f"benchmarks.gpu.{module}" for module, *_ in parts.PARTS.values()}
    program = f"import sys; sys.modules['deepspeed'] = None; import {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("part", ["parity", "attention"])
def test_exactness_holds_on_the_cpu(part, tmp_path):
    rows = rows_of(part, tmp_path)
    assert len(rows) >= 16
    assert [row for name, row in rows.items() if row.passed is not True and not name.endswith(NOT_JUDGED)] == []


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
    assert [row.passed for row in rows_of(part, tmp_path).values()] == outcomes


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    return parts.main()


def test_a_part_that_takes_too_long_is_ended_and_what_was_found_is_kept(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "--cpu", "--only", "attention", "--part-seconds", "0.5", "--output", str(tmp_path)) == 1
    written = json.loads((tmp_path / "results.json").read_text())
    assert [row["check"] for row in written["rows"]] == ["ends in time"] and written["about"]["torch"]
    assert "| attention | ends in time | FAILED |" in (tmp_path / "results.md").read_text()
    assert "1 of 1 parts rehearsed: 0 checks passed, 1 failed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_rehearsal(monkeypatch):
    with pytest.raises(ConfigError, match=r"no GPU.*--cpu"):
        call(monkeypatch)
