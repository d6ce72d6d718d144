"""Our decoder computes what transformers computes, on every kind of base, and packed documents as if alone."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.model.from_hf import open_base
from tests.bases import CONFIGS, STORIES, reference, save_base
from tests.tolerances import assert_near, rounding_of
from tests.widened import packed, scale_settings, some_tokens, unwidened, widened


@torch.no_grad()
def assert_parity(base, tokens):
    expected = reference(base.path)(tokens).logits
    assert expected.std() > 0.5, "logits too small to distinguish two models"
    assert_near(unwidened(base).logits(tokens), expected, rounding_of(base.spec))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(base, name):
    for length in (1, 37, 128):
        assert_parity(base(name), some_tokens(base(name).spec, 2, length))


def test_a_pretrained_model_equals_transformers_and_predicts_english():
    base = open_base(STORIES)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    from transformers import AutoTokenizer

    tokens = torch.tensor([AutoTokenizer.from_pretrained(STORIES)(text).input_ids])
    assert_parity(base, tokens)
    _, nll, *_ = unwidened(base)(tokens[:, :-1], tokens[:, 1:])
    assert nll.mean().exp() < 4, "perplexity of a story by the model's own domain"


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama3 rope", "neox"])
def test_sixteen_bits_equal_transformers_within_their_precision(base, name):
    tokens = some_tokens(base(name).spec, 2, 37)
    expected = reference(base(name).path, torch.bfloat16)(tokens).logits.float()
    epsilon = torch.finfo(torch.bfloat16).eps
    found = unwidened(base(name)).bfloat16().logits(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=epsilon * float(expected.abs().max()))


def test_a_text_may_be_as_long_as_the_rotary_embedding_allows(base):
    assert base("llama dynamic").spec.longest_text == 2 * 32
    assert base("llama yarn").spec.longest_text == base("smollm3").spec.longest_text == 128


LEGACY_CONFIGS = {
    "Pythia's names": ("neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": None}),
    "Llama 3.2's names": (
        "llama3 rope",
        {"rope_theta": 500000.0, "rope_scaling": {**CONFIGS["llama3 rope"].rope_parameters}},
    ),
    "Llama 2's names": (
        "llama linear rope",
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("style", LEGACY_CONFIGS)
def test_configs_written_by_older_libraries_mean_the_same(tmp_path, style):
    name, entries = LEGACY_CONFIGS[style]
    save_base(name, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps({**config, **entries}))
    base = open_base(tmp_path)
    assert base.spec == open_base(save_base(name, tmp_path / "new")).spec
    assert_parity(base, some_tokens(base.spec, 2, 37))


LENGTHS = (5, 16, 9)


def models(base):
    yield unwidened(base)
    yield widened(base, scale_settings("route", collaborative_modules="both", router_threshold=0.9), noise=0.1)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_documents_alone(base, name):
    tokens = some_tokens(base(name).spec, 1, sum(LENGTHS))
    positions, documents = packed(LENGTHS)
    for model in models(base(name)):
        together = model.logits(tokens, positions, documents)
        alone = torch.cat([model.logits(document) for document in tokens.split(LENGTHS, dim=1)], dim=1)
        assert_near(together, alone, rounding_of(model.spec))
        crossing = model.logits(tokens)
        assert (crossing - alone)[:, LENGTHS[0] :].abs().max() > 0.1, "the mask hides nothing"
