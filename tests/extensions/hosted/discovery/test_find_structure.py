"""Structures found by experiments, compared with what transformers' code says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
import torch
from transformers import CONFIG_MAPPING

from pipeline.extensions.hosted.discovery import layers
from pipeline.extensions.hosted.discovery.find_structure import (
    build_without_memory,
    check_names,
    find_structure,
)
from pipeline.extensions.hosted.discovery.tiny_copy import build_tiny_copy
from pipeline.extensions.hosted.structure import HostedStructure, UnsupportedStructureError
from pipeline.model.architecture import changed_entry
from tests.extensions.hosted.expected import AFTER_A_NORM, FULL, QUICK

CASES = [
    *QUICK,
    *[pytest.param(model_type, marks=pytest.mark.full) for model_type in FULL],
]


def _rounded(structure: HostedStructure) -> HostedStructure:
    """With additivity as an expected structure has it, and without the maps and norms that
    `test_maps_and_norms` expects."""
    rounded = []
    for layer in structure.layers:
        blocks = []
        for block in layer.blocks:
            additivity = block.additivity
            if additivity > 0.9:
                additivity = 1.0
            elif 0.3 < additivity < 0.8:
                additivity = AFTER_A_NORM
            blocks.append(replace(block, additivity=additivity))
        rounded.append(replace(layer, blocks=tuple(blocks), linear_maps=(), norms=()))
    return replace(structure, layers=tuple(rounded), last_norms=())


def _as_json(structure: HostedStructure) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(structure.to_json()))


@pytest.mark.parametrize("model_type", CASES)
def test_the_structure_found_is_that_of_the_modelling_code(model_type):
    expected = (QUICK | FULL)[model_type]
    found = find_structure(expected.config())
    assert changed_entry(_as_json(expected.structure()), _as_json(_rounded(found))) is None


def test_the_structure_is_found_twice_alike_and_leaves_the_random_numbers_alone():
    config = QUICK["gemma3"].config()
    state = torch.get_rng_state()
    first = find_structure(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert find_structure(config) == first


REFUSED = {
    "bert": ({"num_hidden_layers": 2}, "is not causal: a change at token 6 moved an earlier one"),
    "roberta": (
        {"num_hidden_layers": 2, "is_decoder": True},
        r"roberta\.encoder\.layer\.0\.attention\.self: an addition to its output does not arrive "
        r"as one in its layer's output \(additivity 0\.\d\d, at least 0\.2\)",
    ),
    "hrm_text": ({}, "its layers are called 6 times in one forward pass"),
    "xlnet": ({"n_layer": 2}, r"its layers run on \[12, 2, 128\] for a text of \[2, 12\]"),
    "blip": ({}, "does not run on text alone: TypeError"),
    "nemotron_h_omni": ({}, "transformers does not say which module computes its logits"),
    "vit": ({}, "model_type 'vit': transformers has no class of its own"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_hosted_is_refused_in_one_line(model_type):
    values, message = REFUSED[model_type]
    with pytest.raises(UnsupportedStructureError, match=message) as refusal:
        find_structure(CONFIG_MAPPING[model_type](**values))
    assert "\n" not in str(refusal.value)


def test_blocks_that_hold_too_little_are_refused_with_the_share(monkeypatch):
    monkeypatch.setattr(layers, "SMALLEST_SHARE", 1.01)
    message = "the blocks found hold 100% of the layers' matrices, at least 101%"
    with pytest.raises(UnsupportedStructureError, match=message):
        find_structure(CONFIG_MAPPING["llama"](num_hidden_layers=2))


def test_a_model_with_other_modules_than_its_tiny_copy_is_refused():
    expected = QUICK["qwen3_moe"]
    config = expected.config()
    tiny = build_tiny_copy(config)
    check_names(expected.structure(), tiny, build_without_memory(config))
    other = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=2, mlp_only_layers=[1])
    with pytest.raises(UnsupportedStructureError, match=r"model\.layers\.1\.mlp is Qwen3MoeMLP"):
        check_names(expected.structure(), tiny, build_without_memory(other))
