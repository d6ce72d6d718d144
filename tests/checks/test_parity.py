"""The base is compared with what transformers makes of it, before anything is made of it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checks import parity
from pipeline.checks.parity import check_against_transformers
from pipeline.errors import BaseModelError
from pipeline.hf.base_files import base_config
from pipeline.hf.load import load_hf_model
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.model.from_hf import open_base
from tests.bases import STORIES, copy_tokenizer, save_base
from tests.files import change_json
from tests.tolerances import assert_parity
from tests.widened import some_tokens, unwidened


@pytest.fixture
def mixed(tmp_path):
    """A base whose layers are of two kinds."""
    return copy_tokenizer(
        save_base(
            "exaone4", tmp_path / "base", vocab_size=512, num_hidden_layers=4, layer_types=None
        )
    )


@pytest.mark.parametrize(
    ("largest_bytes", "said"),
    [
        (2**30, "(4 of 4 layers)"),
        (250_000, "(2 of 4 layers)"),
        (100_000, "not compared with transformers"),
    ],
)
def test_a_base_that_is_read_rightly_passes(mixed, largest_bytes, said, caplog):
    with caplog.at_level(logging.INFO):
        check_against_transformers(open_base(mixed), largest_bytes)
    assert said in caplog.text


def test_a_base_that_is_read_otherwise_is_refused(mixed):
    base = open_base(mixed)
    rotary = next(kind.rotary for kind in base.spec.layers if kind.rotary)
    layers = tuple(
        replace(kind, rotary=rotary) for kind in base.spec.layers
    )  # the global ones have none
    with pytest.raises(
        BaseModelError,
        match=r"differ from those of transformers by .*model_type 'exaone4'. is misread",
    ):
        check_against_transformers(replace(base, spec=replace(base.spec, layers=layers)))
    change_json(mixed / "config.json", intermediate_size=40)
    with pytest.raises(BaseModelError, match=r"config.json implies"):
        check_against_transformers(open_base(mixed))


@torch.no_grad()
def test_a_mistral_with_layer_types_is_the_ministral_that_users_load(tmp_path, monkeypatch):
    """AutoModel gives each layer its own window; MistralForCausalLM would give all the same."""
    path = copy_tokenizer(save_base("ministral", tmp_path / "base", vocab_size=512))
    change_json(path / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    base, tokens = open_base(path), some_tokens(open_base(path).spec, 2, 40)
    assert [kind.window for kind in base.spec.layers] == [12, 12, None]
    expected = AutoModelForCausalLM.from_pretrained(path).eval()(tokens).logits
    assert_parity(unwidened(base).logits(tokens), expected)
    check_against_transformers(base)
    assert_parity(load_hf_model(path)(tokens).logits, expected)
    named = base_config(path)  # what an export of it starts from: servers go by the class's name
    assert (named["model_type"], named["architectures"]) == ("ministral", ["MinistralForCausalLM"])

    all_windows = replace(base, spec=replace(base.spec, layers=base.spec.layers[:1] * 3))
    assert (unwidened(all_windows).logits(tokens) - expected).abs().max() > 0.1
    monkeypatch.setattr("pipeline.checks.parity.PROBE_TEXTS", {"long": PROBE_TEXTS["english"] * 4})
    with pytest.raises(BaseModelError, match="is misread"):
        check_against_transformers(all_windows)

    change_json(path / "config.json", sliding_window=None)
    with pytest.raises(
        BaseModelError, match="expected a number of tokens for sliding layers, found None"
    ):
        open_base(path)


def test_a_nan_in_the_last_text_is_found(monkeypatch):
    compute = parity._logits_by_this_package

    def with_nan(*arguments):
        logits = compute(*arguments)
        assert len(logits) > 1
        logits[-1][0, 0] = math.nan
        return logits

    base = open_base(STORIES)
    check_against_transformers(base)
    monkeypatch.setattr(parity, "_logits_by_this_package", with_nan)
    with pytest.raises(BaseModelError, match="differ from those of transformers by nan"):
        check_against_transformers(base)
