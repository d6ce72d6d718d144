"""The step-cost benchmark runs at its smallest size, and counts what it should."""

from __future__ import annotations

import json
import sys

from benchmarks import step_cost

SIZES = ["--hidden-size", "64", "--intermediate-size", "64", "--num-layers", "4", "--num-attention-heads", "8"]
SIZES += ["--num-key-value-heads", "8", "--vocab-size", "64", "--batch-size", "1", "--sequence-length", "8"]


def test_every_method_is_measured(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.json"
    arguments = [*SIZES, "--threads", "1", "--rounds", "1", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["step_cost.py", *arguments])
    step_cost.main()
    rows = {row["method"]: row for row in json.loads(output.read_text())}
    assert tuple(rows) == step_cost.METHODS
    assert rows["fft"]["flops_ratio_predicted"] == rows["fft"]["ratio_to_fft"] == 1
    assert rows["preserve"]["flops_ratio_predicted"] < rows["adapt"]["flops_ratio_predicted"] < 1
    assert all(row["seconds_per_step"] > 0 and row["trainable_parameters"] > 0 for row in rows.values())
    assert capsys.readouterr().out.count("\n") == 1 + len(rows)
