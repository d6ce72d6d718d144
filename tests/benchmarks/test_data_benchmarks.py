"""The benchmarks of tokenizing, cleaning and loading run at their smallest size."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def report_of(benchmark: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> dict:
    """What the benchmark writes to its --json file."""
    monkeypatch.setattr("sys.argv", [benchmark, "--json", str(folder / "out" / "x.json"), *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(BENCHMARKS / benchmark))["main"]()
    finally:
        torch.set_num_threads(threads)
    return json.loads((folder / "out" / "x.json").read_text())


def test_loading_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["--tokens", "100000", "--sequence-lengths", "64", "128", "--seconds", "0.05", "--scratch", tmp_path]
    report = report_of("loader_throughput.py", tmp_path, monkeypatch, *arguments)
    assert list(report["loader"]) == ["64", "128"]
    measured = [value for row in report["loader"].values() for value in row.values()]
    assert len(measured) == 6 and min(measured) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the corpus is gone


def test_tokenizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = ["--english", STORIES_HELDOUT, "--korean", REVIEWS_HELDOUT]
    arguments = [*texts, "--ours", "--rounds", "1", "--workers", "1", "--scratch", tmp_path]
    report = report_of("tokenize_throughput.py", tmp_path, monkeypatch, *arguments)
    results = report["results"]
    assert [(result["contender"], result["text"]) for result in results] == [
        ("ours, gigatoken", "english"),
        ("ours, gigatoken", "korean"),
    ]
    assert all(min(result["megabytes"], result["cpu_seconds"], result["peak_mib"]) > 0 for result in results)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = report_of("cleaning.py", tmp_path, monkeypatch, "--mib", "0.1", "--scratch", tmp_path)
    assert [result["contender"] for result in report["results"]] == ["ours", "datatrove alone"]
    assert all(min(result["megabytes"], result["cpu_seconds"], result["peak_mib"]) > 0 for result in report["results"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
