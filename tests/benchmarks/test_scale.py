"""The benchmarks of scale run at their smallest sizes, and what must not grow does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale import __main__ as scale
from benchmarks.scale import picture


def tables_of(subject: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What the benchmark of a subject writes to its --json file."""
    arguments = ["--only", subject, "--smallest", "--scratch", str(folder), "--json", str(folder / "out" / "x.json")]
    monkeypatch.setattr("sys.argv", ["benchmarks.scale", *arguments])
    scale.main()
    assert [path.name for path in folder.iterdir()] == ["out"], "what it made is gone"
    return json.loads((folder / "out" / "x.json").read_text())[subject]


def test_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_shards, by_documents = tables_of("corpora", tmp_path, monkeypatch)
    for row in by_shards["rows"] + by_documents["rows"]:
        assert row["open_files"] == 1, "the manifest alone"
        assert row["first_sample_ms"] > 0 and row["manifest_mib"] > 0
    assert [row["inspect_files"] for row in by_shards["rows"]] == [2 + 3 * 5, 2 + 3 * 10], "shards are opened once"


def test_the_picture_of_slopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"corpora": [{"title": "Corpora: …", "goals": {"open_cpu_s": 5}, "slopes": {"open_cpu_s": 1.25}}]}
    (tmp_path / "x.json").write_text(json.dumps(found))
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "x.json"), "--output", str(tmp_path / "x.svg")])
    picture.main()
    assert "Corpora: open_cpu_s" in (text := (tmp_path / "x.svg").read_text()) and "<title>1.25</title>" in text


def test_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [by_steps] = tables_of("metrics", tmp_path, monkeypatch)
    for row in by_steps["rows"]:
        assert row["report_files"] <= 4, "the metrics are read once"
        assert row["report_cpu_s"] > 0 and row["step_ms"] > 0
