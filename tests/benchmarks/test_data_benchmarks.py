"""The benchmarks of tokenizing and cleaning run at their smallest size, and leave nothing but their
rows."""

from __future__ import annotations

import pytest

from benchmarks import cleaning, tokenize_throughput
from tests.benchmarks.calls import rows_of
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

pytestmark = pytest.mark.full

TEXTS = ["--english", STORIES_HELDOUT, "--korean", REVIEWS_HELDOUT]


@pytest.mark.parametrize(
    ("benchmark", "arguments", "contenders"),
    [
        (
            tokenize_throughput,
            [*TEXTS, "--ours", "--rounds", 1, "--workers", 1],
            [
                f"{language}, ours, {what}"
                for language in ("english", "korean")
                for what in (
                    "start",
                    "gigatoken, .jsonl",
                    "gigatoken, .jsonl.zst",
                    "gigatoken, .parquet",
                )
            ],
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
