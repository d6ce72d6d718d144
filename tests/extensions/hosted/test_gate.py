"""A gate over a hosted base: what it leaves closed is transformers' own to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import load_config
from pipeline.errors import BaseModelError, ConfigError
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.extensions.hosted.unsupported import check_hosted_method
from pipeline.gating.folder import open_gate
from pipeline.methods.build_model import build_model
from pipeline.model.bases import check_dtype
from pipeline.parallel.topology import SINGLE
from tests.distributed import run_ranks
from tests.extensions.gate.gates import random_gate
from tests.extensions.hosted.bases import KINDS, by_transformers, hosted, opened, save_hosted
from tests.training.runs import make_run, train, write_config
from tests.widened import packed, some_tokens

ADAPT = {
    "name": "scale",
    "variant": "adapt",
    "expansion": {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
    "l_fp": 1,
    "collaborative_modules": "both",
}
HOSTED = {"base_code": "transformers", "method": ADAPT}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_hosted(kind, folder / kind) for kind in KINDS}


@pytest.mark.parametrize("variant", ["preserve", "adapt"])
@pytest.mark.parametrize("kind", KINDS)
def test_closed_rows_are_those_of_transformers(kind, variant, bases):
    folder = opened(bases[kind])
    model = hosted(folder, variant, noise=0.1)
    tokens = some_tokens(folder.spec, 2, 24)
    with torch.no_grad():
        expected = by_transformers(folder)(tokens, use_cache=False).logits
    ungated = model.logits(tokens)
    assert (ungated - expected).abs().max() > 0.01
    model.gate = random_gate(model, tokens, opens="never")
    assert torch.equal(model.logits(tokens), expected)
    model.gate = random_gate(model, tokens, opens="always")
    assert torch.equal(model.logits(tokens), ungated)


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "deepseek_v3", "mamba"])
def test_closed_tokens_before_the_first_open_one_have_the_base_s_logits(kind, bases):
    """With experts to 2e-7: they multiply the rows that they happen to get (docs/gate.md)."""
    folder = opened(bases[kind])
    model = hosted(folder, noise=0.1)
    positions, documents = packed([9, 15], [4, 20])
    tokens = some_tokens(folder.spec, 2, 24)
    of_base = model.logits(tokens, positions, documents, path="base")
    model.gate = random_gate(model, tokens, opens="sometimes")
    hidden = model.hidden_states(tokens, positions, documents)
    closed = hidden.open_tokens.closed.view(2, 24)
    assert closed.any() and not closed.all()
    # A document's tokens up to its first open one depend on closed tokens alone.
    found = model.logits(tokens, positions, documents)
    for row in range(2):
        for document in documents.ids[row].unique():
            is_here = documents.ids[row] == document
            prefix = is_here & ((~closed[row] & is_here).cumsum(0) == 0)
            assert torch.allclose(found[row][prefix], of_base[row][prefix], rtol=0, atol=2e-6)
            if kind != "deepseek_v3":
                assert torch.equal(found[row][prefix], of_base[row][prefix])


def test_a_base_with_several_residual_streams_has_no_gate(tokens, tmp_path):
    """Gemma 3n carries [4, B, S, D] from layer to layer."""
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    spec = hosted_spec_of(
        {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 3,
            "layer_types": layer_types,
            "num_kv_shared_layers": 0,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 600,
            "vocab_size_per_layer_input": 600,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        }
    )
    assert not spec.structure.has_one_stream
    # The configuration class has a size of each layer.
    assert spec.widths.intermediate_size == 96
    check_dtype(spec, torch.bfloat16)
    config = load_config(write_config(tmp_path, tokens, method=ADAPT, gate={"tokens": 100}))
    with pytest.raises(ConfigError, match=r"gate: .*model_type gemma3n_text\) with several"):
        build_model(config, spec, SINGLE)
    own = load_config(
        write_config(tmp_path, tokens, method={**ADAPT, "open_gains": True}, gate={"tokens": 100})
    )
    with pytest.raises(ConfigError, match=r"open_gains.*: expected a base with one residual"):
        check_hosted_method(own.method, spec)
    model = build_model(config.model_copy(update={"gate": None}), spec, SINGLE)
    with pytest.raises(BaseModelError, match=r"\[4, 2, 12, 64\]: expected \[B, S, 64\]"):
        model.base_stream(some_tokens(spec, 2, 12), layer=1)


def test_a_gate_is_fitted_on_a_trained_run(bases, tokens, tmp_path):
    gate = {"tokens": 3000, "max_open_fraction": 0.01, "negatives_file": None}
    base = str(bases["granite"])
    run = make_run(
        tmp_path / "run", tokens, zero=1, base=base, schedule__steps=20, gate=gate, **HOSTED
    )
    assert run_ranks(train, 1, run) == [0]
    config = load_config(run)
    record, now = fit_gate(config)
    assert now and record.auc > 0.9
    assert record.closed_max_abs_logit_difference in (0.0, None)

    model = open_trained(newest_checkpoint(config), config.base)
    decoder = model.loaded(torch.float32, torch.device("cpu"))
    gate, _ = open_gate(config.folder / "gate")
    decoder.gate = replace(gate, threshold=float("inf"), open_ids=())
    windows = some_tokens(model.base.spec, 2, 24)
    with torch.no_grad():
        expected = by_transformers(opened(bases["granite"]))(windows, use_cache=False).logits
    assert torch.equal(decoder.logits(windows), expected)
