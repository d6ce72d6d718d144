"""The benchmark of gates on texts that look alike runs at its smallest size."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import gate_separation
from benchmarks.gate_separation import NEW, OLD, windows_of
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError, DataError
from tests.bases import STORIES
from tests.benchmarks.calls import rows_of
from tests.texts import DATA

SMALL = ["--base", STORIES, "--tokens", 400, "--max-open-fraction", 0.02, "--sequence-length", 64]
pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_files_of_ones_own_and_layers_that_are_not_there(tmp_path, monkeypatch):
    stories, books = (DATA / "en" / f"{name}.jsonl.zst" for name in ("stories", "gutenberg"))
    rows = rows_of(gate_separation, tmp_path, monkeypatch, *SMALL, "--pair", books, stories, "--layers", 2)
    assert [row["features"] for row in rows] == ["token", "token+running_mean"]
    assert all(row["new"] == str(books) and 0.6 < row["auc"] < 1 for row in rows)
    with pytest.raises(ConfigError, match="--layers: expected 0 to 5"):
        rows_of(gate_separation, tmp_path, monkeypatch, *SMALL, "--layers", 9)


def test_what_counts_are_the_tokens_of_the_text():
    tokenizer = load_tokenizer(STORIES)
    windows = windows_of(["Once upon a time", "the end " * 50], tokenizer, 16, 1000, is_new=True)
    (length,) = tokenizer.reference.encode(["Once upon a time"]).lengths.tolist()
    assert windows.tokens[:, 0].tolist() == list(tokenizer.document_start) * 2
    assert np.flatnonzero(windows.present[0]).tolist() == list(range(1, 1 + length))
    assert windows.present[1].tolist() == [False, *[True] * 15]
    with pytest.raises(DataError, match="found a kind without a token"):
        windows_of([], tokenizer, 16, 10, is_new=True)
