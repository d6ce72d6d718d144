"""The benchmark of gates on texts that look alike runs at its smallest size, and cannot tell what does not differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gate_separation
from benchmarks.gate_separation import Reader, Text
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import DataError
from tests.bases import STORIES
from tests.texts import DATA

SMALL = ["--base", STORIES, "--tokens", 400, "--max-open-fraction", 0.02, "--sequence-length", 64, "--layers", 2]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def report_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict:
    """What the benchmark writes to its --json file."""
    output = folder / "out" / "separation.json"
    monkeypatch.setattr(sys, "argv", ["gate_separation.py", *map(str, [*SMALL, "--json", output, *arguments])])
    gate_separation.main()
    return json.loads(output.read_text())


def test_pairs_and_other_kinds_of_text(tmp_path, monkeypatch, capsys):
    for name in ("ko/reviews", "ko/reviews.heldout", "en/gutenberg"):
        file = f"{name}.jsonl.zst"
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(DATA / file)
    report = report_of(tmp_path, monkeypatch, "--data", tmp_path, "--own-text", 1000)
    fitted = [(row["new"], row["fitted_against"], row["features"]) for row in report["rows"]]
    assert fitted[:3] == [
        ("Korean film reviews", "English books", "token"),
        ("Korean film reviews", "English books", "token+running_mean"),
        ("Korean film reviews", "own text", "token+running_mean"),
    ]
    assert [row["new"] for row in report["rows"][3:]] == [gate_separation.BIOGRAPHIES[0]] * 3
    for row in report["rows"][:2]:
        assert row["auc"] > 0.99 and row["new_open"] > 0.9 and row["old_open"] < 0.05
    for row in report["rows"][3:]:
        assert abs(row["auc"] - 0.5) < 0.2  # the base has read of none of these people
    kinds = {row.pop("kind"): row for row in report["other_kinds"]}
    opened = {name: row["open, against English books"] for name, row in kinds.items()}
    assert opened["Korean film reviews"] > 0.9 and opened["English books"] < 0.05 and opened["names in Hangul"] > 0.9
    assert not [name for name in ("Korean news", "English stories") if name in kinds]  # there are no such files
    printed = capsys.readouterr().out
    assert "Korean film reviews / English books" in printed and "names in Hangul" in printed


def test_files_of_ones_own(tmp_path, monkeypatch):
    stories, books = (DATA / "en" / f"{name}.jsonl.zst" for name in ("stories", "gutenberg"))
    report = report_of(tmp_path, monkeypatch, "--pair", books, stories, "--mlp")
    assert [row["features"] for row in report["rows"]] == ["token", "token+running_mean"]
    assert all(row["new"] == str(books) and 0.6 < row["auc"] < 1 and 0.6 < row["mlp_auc"] < 1 for row in report["rows"])
    assert report["other_kinds"] == []


def test_what_counts_are_the_tokens_of_the_text():
    reader = Reader(load_tokenizer(STORIES), 16)
    start, end = reader.tokenizer.document_start, reader.tokenizer.document_end
    prompt, answer = (
        reader.tokenizer.reference.encode([text]).ids.tolist() for text in ("Once upon", "Once upon a time")
    )
    windows = reader.windows([Text(" a time", "Once upon"), Text("the end " * 50)], 1000, is_new=True)
    assert windows.tokens[0, : len(answer) + len(start) + len(end)].tolist() == [*start, *answer, *end]
    assert windows.present[0].sum() == len(answer) - len(prompt)
    assert windows.present[0, len(start) + len(prompt)] and not windows.present[0, : len(start) + len(prompt)].any()
    assert len(windows) == 2 and windows.present[1].sum() == 16 - len(start) - len(end)  # cut to a window
    assert (windows.positions[:, 0] == 0).all() and windows.is_new.all()
    with pytest.raises(DataError, match="found a kind without a token"):
        reader.windows([], 1000, is_new=True)
