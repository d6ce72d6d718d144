"""The record of an architecture: equal for equal models, and any entry of config.json that matters
changes it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.model.architecture import architecture_of, changed_entry
from pipeline.model.from_hf import read_spec
from tests.bases import CONFIGS
from tests.files import change_json

OTHERS = {
    "rms_norm_eps": ({"rms_norm_eps": 0.5}, "norm_eps (expected 1e-06, found 0.5)"),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "layer_kinds.0.rotary.frequencies.1 (expected 0.1",
    ),
    "activation": ({"hidden_act": "relu"}, "activation (expected 'silu', found 'relu')"),
    "context": (
        {"max_position_embeddings": 256},
        "max_position_embeddings (expected 128, found 256)",
    ),
    "tie": ({"tie_word_embeddings": True}, "tie_word_embeddings (expected False, found True)"),
    "heads": ({"num_key_value_heads": 4}, "widths.num_key_value_heads (expected 2, found 4)"),
    "layers": ({"num_hidden_layers": 2}, "layers (expected [0, 0, 0], found [0, 0])"),
    "family": (
        {"model_type": "mistral", "sliding_window": 7},
        "family (expected 'llama', found 'mistral')",
    ),
}


@pytest.fixture
def config(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    return tmp_path / "config.json"


@pytest.mark.parametrize("name", OTHERS)
def test_another_entry_of_config_json_is_named(config, name):
    recorded = json.loads(json.dumps(architecture_of(read_spec(config))))
    assert changed_entry(recorded, architecture_of(read_spec(config))) is None
    entries, expected = OTHERS[name]
    change_json(config, **entries)
    changed = changed_entry(recorded, architecture_of(read_spec(config)))
    assert changed is not None and changed.startswith(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_base_has_a_record_that_json_keeps(tmp_path, name):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[name].to_dict()))
    found = architecture_of(read_spec(file))
    recorded = json.loads(json.dumps(found))
    assert recorded == found
    assert len(recorded["layers"]) == CONFIGS[name].num_hidden_layers


def test_rounding_new_entries_and_the_runs_own_rows_are_no_change(config):
    spec = read_spec(config)
    recorded = architecture_of(spec)
    [kind] = recorded["layer_kinds"]
    kind["rotary"]["frequencies"] = [value * (1 + 2e-7) for value in kind["rotary"]["frequencies"]]
    del recorded["output_softcap"]
    assert changed_entry(recorded, architecture_of(replace(spec, new_tokens=3))) is None
    assert changed_entry(None, architecture_of(spec)) is None
