"""The benchmark of gates on texts that look alike runs at its smallest size."""

from __future__ import annotations

from benchmarks import gate_separation
from benchmarks.gate_separation import NEW, OLD
from tests.bases import STORIES
from tests.benchmarks.calls import rows_of
from tests.texts import DATA

SMALL = ["--base", STORIES, "--tokens", 400, "--max-open-fraction", 0.02, "--sequence-length", 64]


def test_pairs_and_the_bases_own_text(tmp_path, monkeypatch, capsys):
    for name in (NEW, f"{NEW}.heldout", OLD):
        file = f"{name}.jsonl.zst"
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(DATA / file)
    rows = rows_of(
        gate_separation, tmp_path, monkeypatch, *SMALL, "--data", tmp_path, "--own-text", 1000, "--layers", 2
    )
    assert [(row["new"], row["fitted_against"], row["features"]) for row in rows] == [
        (NEW, OLD, "token"),
        (NEW, OLD, "token+running_mean"),
        (NEW, "own text", "token+running_mean"),
    ]  # the files of the other pairs are missing
    for row in rows[:2]:
        assert row["auc"] > 0.99 and row["new_open"] > 0.9 and row["old_open"] < 0.05
    assert NEW in capsys.readouterr().out
