"""The benchmark of checkpoints runs, at its smallest size, and its sizes are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import checkpoint

ROOT = Path(__file__).parents[2]


def test_sizes_and_times_of_checkpoints(tmp_path, monkeypatch, capsys):
    rows_file = tmp_path / "out" / "rows.json"
    options = ["--bases", "llama-3.2-1b", "--divisor", "32", "--zero-stages", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", *options, "--folder", str(tmp_path), "--json", str(rows_file)])
    monkeypatch.chdir(ROOT)
    checkpoint.main()
    rows = {row["way"]: row for row in json.loads(rows_file.read_text())}
    assert list(rows) == list(checkpoint.WAYS)
    for row in rows.values():
        assert 0 < row["blocked_s_min"] <= row["blocked_s"] <= row["on_disk_s"]
    ours, asynchronous, default = (rows[way] for way in (checkpoint.OURS, checkpoint.ASYNCHRONOUS, checkpoint.DEFAULT))
    assert ours["bytes"] == pytest.approx(asynchronous["bytes"], rel=0.01)
    # 12 bytes a trained parameter and little more, while the default copies every parameter in 16 bits too.
    assert 1 < ours["size_to_needed"] < 1.5
    copies = checkpoint.COPY_BYTES * (ours["base_parameters"] + ours["trainable_parameters"])
    assert default["bytes"] - ours["bytes"] == pytest.approx(copies, rel=0.25)
    table = capsys.readouterr().out
    assert all(way in table for way in checkpoint.WAYS) and list(tmp_path.iterdir()) == [rows_file.parent]
