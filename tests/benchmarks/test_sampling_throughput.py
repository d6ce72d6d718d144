"""The benchmark of sampling runs at its smallest size, and counts what is written."""

from __future__ import annotations

import json

import pytest

from benchmarks import sampling_throughput
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.tokenizer import load_tokenizer
from pipeline.rehearsal.generation import BaseWriter
from tests.bases import STORIES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_batch_size_is_measured(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "rows.json"
    sizes = ["--batch-sizes", "1", "3", "--documents", "2", "--max-tokens", "6", "--turns", "1"]
    monkeypatch.setattr("sys.argv", ["sampling_throughput.py", "--base", str(STORIES), *sizes, "--json", str(output)])
    sampling_throughput.main()
    rows = {row["way"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["generate, one at a time", "sample, 1 at a time", "sample, 3 at a time"]
    assert rows["generate, one at a time"]["ratio"] == 1 and all(row["tokens_per_second"] > 0 for row in rows.values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_tokens_are_counted_without_the_opening():
    tokenizer = load_tokenizer(STORIES)
    model, writer = load_hf_model(STORIES), BaseWriter(STORIES, tokenizer)
    assert sampling_throughput.alone(model, tokenizer, 2, 4, seed=0) == 2 * 3  # no story ends so early
    assert sampling_throughput.in_batches(writer, tokenizer, 2, 3, 4, seed=0) == 4 * 3
