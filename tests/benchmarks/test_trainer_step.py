"""The benchmark beside transformers' Trainer and PEFT runs at its smallest size, on equal work."""

from __future__ import annotations

import pytest

from benchmarks.trainer_step import __main__ as trainer_step
from benchmarks.trainer_step.work import Step
from tests.benchmarks.calls import rows_of


@pytest.mark.full
def test_both_sides_do_the_same_work(tmp_path, monkeypatch, capsys):
    options = ["--tiny", "--rounds", 1, "--recomputed", "no", "--method", "fft", "lora"]
    fft, lora = rows_of(trainer_step, tmp_path, monkeypatch, *options, "--dtype", "fp32")
    # Every step's loss, from the same weights and tokens: they stay equal while both sides train
    # by the same optimizer. fp32 sums of 30 losses differ by their order.
    assert len(fft["loss_ours"]) == len(fft["loss_theirs"]) > 2
    assert fft["loss_ours"] == pytest.approx(fft["loss_theirs"], rel=1e-4)
    assert fft["loss_ours"][-1] < fft["loss_ours"][0] - 0.5, "it trains"
    # PEFT draws other values of A, which the first step does not show, as B is zero.
    assert lora["loss_ours"][0] == pytest.approx(lora["loss_theirs"][0], rel=1e-6)
    for row in (fft, lora):
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["ratio_flops"] == 1
        assert row["us_per_token_ours"] > 0 and row["us_per_token_theirs"] > 0
    assert "us per token ours" in capsys.readouterr().out


@pytest.mark.full
def test_preserve_has_fewer_flops_than_what_it_stands_beside(tmp_path, monkeypatch):
    options = ["--tiny", "--rounds", 1, "--recomputed", "yes", "--method", "preserve"]
    (row,) = rows_of(trainer_step, tmp_path, monkeypatch, *options, "--dtype", "fp32")
    assert 0 < row["ratio_flops"] < 1
    assert row["ratio_by_flops"] == pytest.approx(row["ratio"] / row["ratio_flops"])


def test_a_type_that_the_processor_does_not_multiply_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_step, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(trainer_step, "measured", lambda work, rounds: {"dtype": work.dtype})
    rows = rows_of(trainer_step, tmp_path, monkeypatch, "--tiny")
    assert [row["dtype"] for row in rows] == ["fp32"] * 6 + ["bf16"]
    assert rows[-1]["outcome"] == trainer_step.NOT_MEASURED


def test_a_ratio_is_of_one_round():
    """Both sides are delayed in the second of three rounds: the ratio does not change."""
    turns = [([Step(s, 1.0, 0.0)], [Step(2 * s, 4.0, 0.0)]) for s in (1.0, 9.0, 1.0)]
    row = trainer_step.ratios(turns, tokens=10)
    assert row["ratio_min"] == row["ratio"] == row["ratio_max"] == 0.5
    assert row["ratio_cpu"] == 0.25
    assert row["us_per_token_theirs"] == 2e5
