"""The benchmarks of tokenizing, cleaning and loading run at their smallest size, and leave nothing but their rows."""

from __future__ import annotations

import pytest

from benchmarks import cleaning, loader_throughput, tokenize_throughput
from tests.benchmarks.calls import rows_of
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

TEXTS = ["--english", STORIES_HELDOUT, "--korean", REVIEWS_HELDOUT]


def test_loading_samples(tmp_path, monkeypatch):
    arguments = ["--tokens", 100000, "--sequence-lengths", 64, 128, "--seconds", 0.05, "--scratch", tmp_path]
    rows = rows_of(loader_throughput, tmp_path, monkeypatch, *arguments)
    assert [row["sequence_length"] for row in rows] == [64, 128]
    assert all(len(row) == 4 and min(row.values()) > 0 for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("benchmark", "arguments", "contenders"),
    [
        (
            tokenize_throughput,
            [*TEXTS, "--ours", "--rounds", 1, "--workers", 1],
            ["english, ours, gigatoken", "korean, ours, gigatoken"],
        ),
        (cleaning, ["--mib", 0.1], ["ours", "datatrove alone"]),
    ],
    ids=["tokenizing", "cleaning"],
)
def test_contenders_are_measured(benchmark, arguments, contenders, tmp_path, monkeypatch):
    rows = rows_of(benchmark, tmp_path, monkeypatch, *arguments, "--scratch", tmp_path)
    assert [row["contender"] for row in rows] == contenders
    assert all(min(row["megabytes"], row["cpu_seconds"], row["peak_mib"]) > 0 for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
