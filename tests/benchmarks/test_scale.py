"""The benchmarks of scale run at their smallest sizes, and what must not grow does not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scale import __main__ as scale
from benchmarks.scale import muon
from pipeline.optimizers.muon import orthogonalised

pytestmark = pytest.mark.full


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.scale", *map(str, arguments)])
    scale.main()


def tables_of(subject: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What the benchmark of a subject writes to its --json file."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run(monkeypatch, "--only", subject, "--smallest", "--json", folder / "out" / "x.json")
    assert not [*folder.glob("scale-*")], "what it made is gone"
    return json.loads((folder / "out" / "x.json").read_text())[subject]


def test_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_files, by_bytes, by_shards, by_documents = tables_of("corpora", tmp_path, monkeypatch)
    listed_folders = by_files["rows"][0]["listed_folders"]
    for row in by_files["rows"]:
        assert row["state_files_a_file"] <= 2, "a record of the units, and one of a unit"
        assert row["listed_folders"] == listed_folders, "no folder is listed for each file"
    for row in by_bytes["rows"]:
        assert row["plan_files"] <= 3
    for row in by_shards["rows"] + by_documents["rows"]:
        assert row["open_files"] == 1, "the manifest alone"
        assert row["first_sample_ms"] > 0 and row["manifest_mib"] > 0
    for row in by_shards["rows"]:
        # Two files of the corpus, and three of each shard.
        assert row["inspect_files"] == 2 + 3 * row["shards"], "each once"


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_ranks, *steps = tables_of("ranks", tmp_path, monkeypatch)
    two, four = by_ranks["rows"]
    assert two["small_files_a_rank"] == 2 * four["small_files_a_rank"], (
        "one rank of a node reads small files"
    )
    assert two["broadcast_kib"] == pytest.approx(four["broadcast_kib"], rel=0.01)
    for table in steps:
        for row in table["rows"]:
            off = {name: row[name] for name in table["goals"] if row[name] > table["goals"][name]}
            assert not off.keys() - {"forward_error"}, "the estimate is what a rank holds and sends"


def test_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [by_ranks] = tables_of("muon", tmp_path, monkeypatch)
    two, four, many = by_ranks["rows"]
    assert two["messages"] == many["messages"] == 2, "one to the owners, and one back"
    assert two["mean_mib"] > four["mean_mib"] > many["mean_mib"] > 0
    assert many["ranks"] > many["matrices"] == 14
    for row in by_ranks["rows"]:
        assert row["over_best"] <= 1.1
        assert 1 < row["total_over_busiest"] <= row["ranks"]


def test_the_flops_of_muon_are_those_of_its_products():
    for shape in [(8, 24), (24, 8), (16, 16)]:
        with FlopCounterMode(display=False) as counter:
            orthogonalised(torch.ones(1, *shape))
        assert muon.flops(shape) == counter.get_total_flops()


def test_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [by_ranks] = tables_of("watchdog", tmp_path, monkeypatch)
    assert [row["ranks"] for row in by_ranks["rows"]] == [4, 8], "the rank that is gone was named"
    assert all(row["core_fraction"] > 0 for row in by_ranks["rows"])


def test_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    *by_ranks, by_steps = tables_of("run_folder", tmp_path, monkeypatch)
    for table in by_ranks:
        for row in table["rows"]:
            assert row["index_files"] == row["ranks"], "each header is read once"
            assert row["restore_files"] == 2, "a rank at half the ranks reads the files of two"
    for row in by_steps["rows"]:
        assert row["report_files"] <= 8, (
            "the metrics, each template, and matplotlib's font and its list of fonts, once each"
        )
        assert row["report_cpu_s"] > 0 and row["a_step_cpu_s"] > 0


def test_the_picture_has_the_slope_of_each_cost_with_a_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = {
        "title": "Metrics: a line for each step",
        "rows": [{"steps": 10, "cpu_s": 1.0}, {"steps": 20, "cpu_s": 2.0}],
        "goals": {"cpu_s": 5.0, "files": 5.0},
        "slopes": {"cpu_s": 1.0, "files": None},
    }
    (tmp_path / "x.json").write_text(json.dumps({"run_folder": [table]}))
    picture = tmp_path / "scale.svg"
    run(monkeypatch, "--only", "--json", tmp_path / "x.json", "--picture", picture)
    text = picture.read_text(encoding="utf-8")
    assert "Metrics: cpu_s by steps" in text and "<title>1.00</title>" in text
    assert "linear" in text and "files by steps" not in text
