"""The benchmark of the norm's statistics runs at its smallest size: one choice, one step, one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import norm_statistics
from tests.training.runs import make_tokens, write_config

ROOT = Path(__file__).parents[2]


def test_perplexities_before_and_after(tmp_path, monkeypatch, capsys):
    config = write_config(tmp_path / "run", make_tokens(tmp_path / "tokens"), zero=1)
    output = tmp_path / "rows.json"
    sizes = ["--norms", "base", "--steps", "1", "--seeds", "1", "--ranks", "1"]
    monkeypatch.setattr(sys, "argv", ["norm_statistics.py", "--config", str(config), *sizes, "--json", str(output)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    norm_statistics.main()
    (row,) = json.loads(output.read_text())
    assert (row.pop("norm"), row.pop("seed")) == ("base", 1)
    parts = ("english", "korean")
    assert row.keys() == {f"{part}_perplexity_{moment}" for part in parts for moment in ("before", "after")}
    assert all(row[f"{part}_perplexity_before"] != row[f"{part}_perplexity_after"] for part in parts)
    assert capsys.readouterr().out.splitlines()[-1].startswith("base       mean")
