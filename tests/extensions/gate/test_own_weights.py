"""A run whose open tokens have weights of their own: from training over its gate to its export and
evaluation.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import load_config
from pipeline.conversion.convert import convert, latest_conversion, run_sources
from pipeline.conversion.probe_texts import probe_maker
from pipeline.extensions.combination.combine import combine
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.hf.load import load_hf_model
from tests.bases import STORIES, reference
from tests.distributed import run_ranks
from tests.programs import scale_cpt
from tests.training.runs import in_turn, make_run, train

OWN = {"open_rows": {"min_count": 5}, "open_gains": True}
METHODS = {
    "adapt": {f"method__{name}": value for name, value in OWN.items()} | {"method__low_rank": 4},
    "lora": {"method": {"name": "lora", "rank": 4, **OWN}},
}
GATE_LAYERS = {"adapt": 3, "lora": 2}
"""Where the gate reads by default: at l_fp; above the embedding, from where on LoRA trains."""
NOT_MERGED = {
    "adapt": "--format merged: method.norm separate: an ordinary RMSNorm takes one mean square",
    "lora": "--format merged: a gate decides for each token (--without-gate leaves it out)",
}
"""Why the run cannot leave as an ordinary model."""
GATE = {"tokens": 3000, "max_open_fraction": 0.01, "negatives_file": None}


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def run(method, tokens, tmp_path_factory):
    """The configuration of a finished run."""
    path = make_run(
        tmp_path_factory.mktemp("own") / "run",
        tokens,
        zero=1,
        schedule__learning_rate=0.02,
        gate=GATE,
        **METHODS[method],
    )
    assert run_ranks(in_turn, 1, [partial(train, path)]) == [[0]]
    return path


def test_it_is_trained_gated_exported_and_evaluated(run, method):
    config = load_config(run)
    model = open_trained(newest_checkpoint(config), config.base)
    own_tokens = model.manifest.run.own_tokens
    assert own_tokens and len(own_tokens) < model.spec.vocab_size
    for name in ("output.own_rows", "layers.3.ffn.up.adapter.b", "final_norm.own.weight"):
        assert model.read(name).abs().max() > 1e-3, f"{name} has not trained"

    record, _ = fit_gate(config)
    korean, english = record.heldout["korean"], record.heldout["english"]
    assert record.layer == GATE_LAYERS[method] and record.auc > 0.99
    assert korean.open_fraction > 0.9 and english.open_fraction < 0.05
    assert english.closed_sequences > 0 and record.closed_max_abs_logit_difference == 0.0
    assert korean.base_perplexity > 2 * korean.gated_perplexity

    conversion = latest_conversion(config)
    assert convert(conversion, probe_maker(*run_sources(config)))
    report = json.loads((conversion.output / "verification.json").read_text())
    assert report["max_abs"] < 1e-4 and set(report["texts"]) == {"korean", "english"}
    stored = load_file(conversion.output / "model.safetensors")
    # Bytes that spell Korean, which no English story has.
    is_open_id = stored["token_gate.is_open_id"]
    assert record.open_ids == is_open_id.sum() > 20 and record.open_ids_of_new > 0.5
    assert record.open_ids_of_old < 1e-3 and not is_open_id[:3].any()
    table = stored["output.row_of_token"]
    assert torch.equal((table < len(own_tokens)).nonzero().flatten(), torch.tensor(own_tokens))
    card = (conversion.output / "README.md").read_text()
    assert f"| rows of embedding and output | {len(own_tokens) + 1:,} |" in card
    assert "| open_gains | True |" in card
    shut = torch.tensor([[1, 403, 407, 261, 378]])
    with torch.no_grad():
        found = load_hf_model(conversion.output)(shut).logits
        assert (found - reference(STORIES)(shut).logits).abs().max() < 1e-4

    combine(config.folder / "combined", {"korean": config.folder})  # compares it with the export
    combined = load_hf_model(config.folder / "combined")
    of_base = reference(STORIES)
    open_text = torch.tensor([[1, *is_open_id.nonzero().flatten()[:9].tolist()]])
    with torch.no_grad():
        assert (combined(shut).logits - of_base(shut).logits).abs().max() < 1e-4
        assert (combined(open_text).logits - of_base(open_text).logits).abs().max() > 0.1

    done = scale_cpt("evaluate", run)
    assert done.returncode == 0, done.stderr
    scores = json.loads((config.folder / "summary.json").read_text())["scores"]
    before, after = scores["before"], scores["after"]
    assert after["korean"]["nll_per_token"] < before["korean"]["nll_per_token"] - 1
    assert abs(after["english"]["nll_per_token"] - before["english"]["nll_per_token"]) < 0.01


def test_refused_formats_say_what_stands_against_them(run, method):
    done = scale_cpt("convert", run, "--without-gate", "--format", "scale")
    assert done.returncode == 1
    assert "this model has no gate (leave --without-gate out)" in done.stderr.splitlines()[-1]
    done = scale_cpt("convert", run, "--format", "merged")
    assert done.returncode == 1
    assert NOT_MERGED[method] in done.stderr.splitlines()[-1]
