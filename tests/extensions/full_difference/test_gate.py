"""Full fine-tuning with a gate: from training over the gate, fitted on the base, to an export of the
base and a difference, and its evaluation.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import difference_quality
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import load_config
from pipeline.conversion.convert import convert, latest_conversion, run_sources
from pipeline.conversion.probe_texts import probe_maker
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.hf.load import load_hf_model
from tests.bases import STORIES, reference
from tests.distributed import run_ranks
from tests.programs import scale_cpt
from tests.training.runs import in_turn, make_run, train

GATE = {"tokens": 3000, "max_open_fraction": 0.01, "negatives_file": None}


@pytest.fixture(scope="module")
def run(tokens, tmp_path_factory):
    """The configuration of a finished run."""
    path = make_run(
        tmp_path_factory.mktemp("difference") / "run",
        tokens,
        zero=1,
        method={"name": "fft"},
        schedule__learning_rate=0.005,
        schedule__optimizer="muon",
        gate=GATE,
    )
    assert run_ranks(in_turn, 1, [partial(train, path)]) == [[0]]
    return path


def test_it_is_trained_gated_exported_and_evaluated(run):
    config = load_config(run)
    record, _ = fit_gate(config)
    korean, english = record.heldout["korean"], record.heldout["english"]
    assert record.layer == 2 and record.auc > 0.99
    assert korean.open_fraction > 0.9 and english.open_fraction < 0.05
    assert english.closed_sequences > 0
    # The base runs by itself: the export, which joins the two, is compared with it below.
    assert record.closed_max_abs_logit_difference is None
    assert korean.base_perplexity > 2 * korean.gated_perplexity
    assert english.gated_perplexity == pytest.approx(english.base_perplexity, rel=0.02)
    # What the gate reads is the base's, not the trained model's.
    model = open_trained(newest_checkpoint(config), config.base)
    name = "layers.1.ffn.up.base.weight"
    assert not torch.equal(model.read(name), model.base.read(name))

    done = scale_cpt("convert", run, "--bits", "8", "--min-count", "5")
    assert done.returncode == 0, done.stderr
    assert "closed tokens have the base's logits to the bit" in done.stderr
    folder = config.folder / "hf"
    conversion = json.loads((folder / "conversion.json").read_text())
    assert conversion["written_format"] == "difference"
    stored = conversion["difference"]
    assert stored["bits"] == 8 and 1 < stored["own_rows"] < model.spec.vocab_size + 1
    assert 1 < stored["stored_x"] < 1.9
    report = json.loads((folder / "verification.json").read_text())
    assert report["closed_tokens"] > 0 and report["lost"] < 0.02
    card = (folder / "README.md").read_text()
    assert "This folder is for inference" in card and "trust_remote_code=True" in card
    assert not convert(
        # An equal request has made it already.
        replace(latest_conversion(config), options={"bits": 8, "min_count": 5}),
        probe_maker(*run_sources(config)),
    )

    shut = torch.tensor([[1, 403, 407, 261, 378]])
    with torch.no_grad():
        found = load_hf_model(folder)(shut).logits
        assert torch.equal(found, reference(STORIES)(shut).logits)
    done = scale_cpt("evaluate", run)
    assert done.returncode == 0, done.stderr
    scores = json.loads((config.folder / "summary.json").read_text())["scores"]
    before, after = scores["before"], scores["after"]
    assert after["korean"]["nll_per_token"] < before["korean"]["nll_per_token"] - 1
    assert abs(after["english"]["nll_per_token"] - before["english"]["nll_per_token"]) < 0.05


def test_what_is_refused(run):
    fit_gate(load_config(run))
    done = scale_cpt("convert", run, "--format", "merged")
    assert done.returncode == 1
    assert "--format merged: a gate decides for each token" in done.stderr.splitlines()[-1]
    done = scale_cpt("convert", run, "--format", "difference", "--without-gate")
    assert "this model has no gate" in done.stderr.splitlines()[-1]
    done = scale_cpt("convert", run, "--format", "merged", "--without-gate", "--bits", "4")
    assert (
        "--bits: expected --format difference, found --format merged"
        in done.stderr.splitlines()[-1]
    )
    done = scale_cpt("convert", run, "--min-count", "1000000000")
    assert "--min-count: expected at most" in done.stderr.splitlines()[-1]


def test_without_its_gate_it_is_exported_without_the_tokens_of_the_run(run, tmp_path):
    gone = ["--set", f"data.folder={tmp_path / 'gone'}"]
    done = scale_cpt("convert", run, "--without-gate", "--output", tmp_path / "hf", *gone)
    assert done.returncode == 0, done.stderr
    assert "without its gate the model uses what was trained on every token" in done.stderr
    made = json.loads((tmp_path / "hf" / "conversion.json").read_text())
    assert made["written_format"] == "merged"
    done = scale_cpt("convert", run, "--without-gate", "--bits", "8", *gone)
    assert "found format merged of method fft" in done.stderr.splitlines()[-1]


def test_the_benchmark_measures_it(run):
    config = load_config(run)
    fit_gate(config)
    rows = {row["model"]: row for row in difference_quality.measure(config, [8], 5)}
    assert list(rows) == ["base", "ungated", "gated", "8 bits"]
    packed = rows["8 bits"]
    assert packed["english"] == pytest.approx(rows["gated"]["english"], rel=0.02)
    # Rare tokens share a row, which costs more in so small a corpus than 8 bits do.
    assert packed["korean"] < 0.6 * rows["base"]["korean"]
    assert 1 < packed["stored_x"] < 2 and packed["lost"] < 0.02
