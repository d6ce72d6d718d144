"""How long the texts of a hosted base may be, by each type's own name, and beside other texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.extensions.hosted.discovery.tiny_copy import build_tiny_copy
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.extensions.hosted.survey import all_types, entries_of, survey
from pipeline.methods.build_model import build_model
from pipeline.model.bases import open_base
from pipeline.parallel.topology import SINGLE
from tests.bases import copy_tokenizer, random_model
from tests.extensions.hosted.test_gate import ADAPT
from tests.training.runs import write_config

_FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    **_FACTORS,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 600,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("model_type", "rope", "longest"),
    [
        ("phi3", LONGROPE, 64),
        ("granite", LONGROPE, 64),
        ("falcon", DYNAMIC, 256),  # documents kept apart by a mask
        ("falcon_h1", LONGROPE, 64),  # a row for each document
        ("granite", DYNAMIC, 256),
        ("granite", YARN, None),
        ("granite", None, None),
        ("gpt2", None, None),  # learned positions, beyond which there are none
    ],
)
def test_documents_that_change_each_other_beyond_a_context_are_found(model_type, rope, longest):
    own: dict[str, dict[str, Any]] = {
        "falcon_h1": {"head_dim": 32},
        "phi3": {"original_max_position_embeddings": 64},  # it has an entry of its own for it
    }
    entries = {**SMALL, **own.get(model_type, {})}
    changes = {} if rope is None else {"rope_parameters": rope}
    spec = hosted_spec_of({"model_type": model_type, **entries, **changes})
    assert spec.independent_context == longest
    assert spec.longest_document == (longest or spec.max_position_embeddings)


@torch.no_grad()
def test_the_probe_finds_what_transformers_does():
    """The row beside a long document is another one."""
    config = CONFIG_MAPPING["granite"](**{**SMALL, "rope_parameters": LONGROPE})
    model = random_model(config).eval()
    tokens = torch.arange(160).view(2, 80) + 20
    short = torch.arange(80) % 40
    beside = []
    for other in (short, torch.arange(80)):
        positions = torch.stack([short, other])
        beside.append(model(tokens, position_ids=positions, use_cache=False).logits[0])
    assert (beside[0] - beside[1]).abs().max() > 1e-2


def test_a_longer_document_is_refused_by_name(tokens, tmp_path):
    config = CONFIG_MAPPING["granite"](**{**SMALL, "rope_parameters": LONGROPE})
    random_model(config).save_pretrained(tmp_path / "base")
    copy_tokenizer(tmp_path / "base")
    spec = open_base(tmp_path / "base").spec

    def build(**changes: Any) -> None:
        path = write_config(tmp_path, tokens, base=str(tmp_path / "base"), method=ADAPT, **changes)
        build_model(load_config(path), spec, SINGLE)

    build(data__sequence_length=64)
    message = r"data\.sequence_length: expected at most 64 .*granite.*found 65.*rotary frequencies"
    with pytest.raises(ConfigError, match=message) as refused:
        build(data__sequence_length=65)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "entry"),
    [
        ("mpt", "max_seq_len"),
        ("whisper", "max_target_positions"),
        ("gpt2", "n_positions"),
        ("rwkv", "context_length"),
        ("bloom", "seq_length"),
        ("llama", "max_position_embeddings"),
    ],
)
def test_the_context_has_each_type_s_own_name(model_type, entry):
    layers = {"mpt": "n_layers", "bloom": "n_layer", "gpt2": "n_layer"}
    few = {layers.get(model_type, "num_hidden_layers"): 2}
    spec = hosted_spec_of({"model_type": model_type, entry: 96, **few})
    assert spec.max_position_embeddings == 96


@pytest.mark.full
@torch.no_grad()
def test_a_type_without_a_context_takes_texts_of_any_length():
    """Where no name was read, the model runs on a text beyond everything that tiny copies are cut to."""
    without: list[str] = []
    for found in survey(all_types()):
        if found.use != "hosted":
            continue
        values = {"model_type": found.model_type, **entries_of(found.model_type)}
        if hosted_spec_of(values).max_position_embeddings < 2**31:
            continue
        without.append(found.model_type)
        tiny = build_tiny_copy(CONFIG_MAPPING[found.model_type].from_dict(values))
        logits = tiny(input_ids=torch.arange(300)[None] % 170 + 20, use_cache=False).logits
        assert logits.isfinite().all(), found.model_type
    assert "mamba" in without and "mpt" not in without
