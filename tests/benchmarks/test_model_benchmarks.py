"""The benchmarks of checkpoints, generation and sampling run at their smallest size, and count what they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint, generation_speed, sampling_throughput
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.tokenizer import load_tokenizer
from pipeline.rehearsal.generation import BaseWriter
from tests.bases import STORIES
from tests.benchmarks.calls import rows_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sizes_and_times_of_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    options = ["--bases", "llama-3.2-1b", "--divisor", 32, "--zero-stages", 1, "--rounds", 1, "--folder", tmp_path]
    rows = {row["way"]: row for row in rows_of(checkpoint, tmp_path, monkeypatch, *options)}
    assert list(rows) == list(checkpoint.WAYS)
    for row in rows.values():
        assert 0 < row["blocked_s_min"] <= row["blocked_s"] <= row["on_disk_s"]
    ours, asynchronous, default = (rows[way] for way in (checkpoint.OURS, checkpoint.ASYNCHRONOUS, checkpoint.DEFAULT))
    assert ours["bytes"] == pytest.approx(asynchronous["bytes"], rel=0.01)
    # 12 bytes a trained parameter and little more, while the default copies every parameter in 16 bits too.
    assert 1 < ours["size_to_needed"] < 1.5
    copies = checkpoint.COPY_BYTES * (ours["base_parameters"] + ours["trainable_parameters"])
    assert default["bytes"] - ours["bytes"] == pytest.approx(copies, rel=0.25)
    table = capsys.readouterr().out
    assert all(way in table for way in checkpoint.WAYS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the checkpoints are gone"


def test_every_model_generates(tmp_path, monkeypatch, capsys):
    sizes = ["--layers", 1, "--vocab-size", 64, "--new-tokens", 3, "--turns", 1, "--prompt-tokens", 20]
    sizes += ["--gate-features", "token+running_mean"]
    rows = {row["model"]: row for row in rows_of(generation_speed, tmp_path, monkeypatch, *sizes)}
    names = [f"1/{share}, {kind}" for share in (8, 2) for kind in ("stock", "scale", "gate shut", "gate open")]
    several = ["4 x 1/8, gate shut", "4 x 1/8, gate open"]
    assert list(rows) == ["base", *several, *names] and rows["base"]["ratio_to_base"] == 1
    assert all(row["tokens_per_second"] * row["seconds"] == pytest.approx(3) for row in rows.values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_the_base_and_several_expansions_are_loaded_from_files(tmp_path, monkeypatch):
    sizes = ["--loading", "--layers", 2, "--vocab-size", 64, "--turns", 1]
    base, several = rows_of(generation_speed, tmp_path, monkeypatch, *sizes)
    assert (base["model"], several["model"]) == ("base", "4 x 1/8") and several["seconds"] > 0
    assert 1.3 < several["gib_of_weights"] / base["gib_of_weights"] < 2 and several["gib_to_base"] > 1


def test_the_scale_export_has_the_stock_exports_blocks():
    made = generation_speed.models(1024, 1, 64, torch.float32)
    count = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in made.items()}
    assert count["base"] < count["1/2, stock"] == count["1/2, scale"] < count["1/2, gate shut"]


def test_other_widths_are_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        rows_of(generation_speed, tmp_path, monkeypatch, "--hidden-size", 1000)
    assert "expected a multiple of 1024, found 1000" in capsys.readouterr().err


def test_every_batch_size_is_sampled(tmp_path, monkeypatch):
    sizes = ["--batch-sizes", 1, 3, "--documents", 2, "--max-tokens", 6, "--turns", 1]
    rows = rows_of(sampling_throughput, tmp_path, monkeypatch, "--base", STORIES, *sizes)
    assert [row["way"] for row in rows] == ["generate, one at a time", "sample, 1 at a time", "sample, 3 at a time"]
    assert rows[0]["times_one_at_a_time"] == 1 and all(row["tokens_per_second"] > 0 for row in rows)


def test_sampled_tokens_are_counted_without_the_opening():
    tokenizer = load_tokenizer(STORIES)
    model, writer = load_hf_model(STORIES), BaseWriter(STORIES, tokenizer)
    assert sampling_throughput.alone(model, tokenizer, 2, 4, seed=0) == 2 * 3  # no story ends so early
    assert sampling_throughput.in_batches(writer, tokenizer, 2, 3, 4, seed=0) == 4 * 3
