"""Parameters that compute a token, of mixtures that transformers computes."""

from __future__ import annotations

import json

import pytest

from pipeline.extensions.hosted.mixtures import idle_parameters
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.extensions.hosted.transformers_model import build_base
from tests.extensions.hosted.bases import hosted_config

HIDDEN = 32


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "idle"),
    [
        ("llama", 0),
        # Experts of gate, up and down; 6 of which a token takes 2.
        ("qwen3_moe", 3 * 4 * 3 * 20 * HIDDEN),
        # The first of three layers is dense; 8 experts of which a token takes 2.
        ("deepseek_v3", 2 * 6 * 3 * 20 * HIDDEN),
        # With a bias of each expert: 2 of 4 are idle.
        ("gpt_oss", 3 * 2 * (3 * 32 * HIDDEN + 2 * 32 + HIDDEN)),
    ],
)
def test_the_experts_that_a_token_does_not_take_are_idle(kind, idle):
    # As a config.json has it: the keys of some of its sections are numbers until then.
    spec = hosted_spec_of(json.loads(hosted_config(kind).to_json_string()))
    assert idle_parameters(spec, build_base(spec)) == idle
