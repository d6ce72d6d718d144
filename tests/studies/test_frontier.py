"""The frontier of a study: its rows, its front, and whether its goals hold."""

from __future__ import annotations

import pytest

from pipeline.config.data import Data
from pipeline.config.run import load_config
from pipeline.run_folder.metrics import METRICS, read_metrics, read_validations
from pipeline.studies.frontier import FrontierRow, averaged_perplexities, describe_rehearsal, frontier_table
from tests.distributed import run_ranks
from tests.training.runs import make_tokens, train, write_config

BASE = FrontierRow(label="Base", method="base", new_perplexity=200, old_perplexity=100, perplexities={})


def row(method, new, old, **changes):
    values = {"label": f"{method} {new}", "method": method, "new_perplexity": new, "old_perplexity": old, "seed": 1}
    return FrontierRow(**{**values, "perplexities": {}, "inference_cost": 1.2, **changes})


def test_seeds_are_one_line_and_what_nothing_beats_is_on_the_front():
    seeds = [row("adapt", new, 100, label="Adapt", seed=seed) for seed, new in enumerate((80, 82))]
    gated = row("adapt", 90, 100.5, label="Adapt", gated=True)
    lines = frontier_table([BASE, *seeds, gated, row("fft", 60, 300, label="FFT")]).splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["Adapt", "Base", "Adapt + gate", "FFT"]
    assert [line.endswith("front") for line in lines] == [True, False, False, True]
    assert "81.00 ±1.41" in lines[0]


def test_rehearsal_is_told_by_source_share_and_loss():
    corpora = {
        "ko": {"input": ["ko.txt"]},
        "en": {"input": ["en.txt"], "role": "replay"},
        "own": {"role": "rehearsal", "sample": {"tokens": 100}},
    }
    values = {"folder": "tokens", "sequence_length": 8, "corpora": corpora}

    def told(**changes):
        return describe_rehearsal(Data.model_validate({**values, **changes}))

    assert told() == "own text 1/16 kl"
    assert told(rehearsal_fraction=0) == "none"
    assert told(replay_fraction=0.125, rehearsal_fraction=0) == "replay 1/8 nll"
    assert told(replay_fraction=0.03125, replay_loss="kl") == "replay 1/32 kl, own text 1/16 kl"


def test_averages_lie_between_the_base_and_the_fine_tuned_model(tmp_path):
    tokens = make_tokens(tmp_path / "tokens")
    path = write_config(tmp_path / "run", tokens, zero=1, method={"name": "fft"}, schedule__learning_rate=1e-2)
    assert run_ranks(train, 1, path) == [0]
    config = load_config(path)
    before, *_, after = read_validations(read_metrics(config.folder / METRICS), config.folder / METRICS)
    # Other sums than training's validation, in fp32.
    none, half, whole = averaged_perplexities(config, [0.0, 0.5, 1.0])
    for found, figures in ((none, before.figures), (whole, after.figures)):
        expected = {name: own["perplexity"] for name, own in figures.items()}
        assert found == pytest.approx(expected, rel=1e-4)
    assert after.figures["korean"]["perplexity"] < half["korean"] < before.figures["korean"]["perplexity"]
