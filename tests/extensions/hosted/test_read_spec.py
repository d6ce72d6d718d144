"""What is read of a hosted base's config.json, and what transformers' code may raise meanwhile."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, MoshiForConditionalGeneration

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted import read_spec
from pipeline.extensions.hosted.discovery.tiny_copy import shrunk
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.model.bases import open_base


@pytest.mark.parametrize(
    "step",
    [
        "read_spec.find_structure",
        "read_spec.find_output_formula",
        "discovery.output_formula._body_name",
    ],
)
def test_what_a_probe_raises_is_one_line(step, monkeypatch):
    def fail(*_args):
        raise IndexError("too many indices\nfor a tensor")

    monkeypatch.setattr(f"pipeline.extensions.hosted.{step}", fail)
    read_spec._spec_of.cache_clear()
    message = "model_type llama: its structure cannot be found; use a base of another type: IndexEr"
    with pytest.raises(BaseModelError, match=message) as refusal:
        hosted_spec_of({"model_type": "llama", "num_hidden_layers": 2})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "theta"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, 500.0),
        ({"full_attention": {"rope_type": "default", "rope_theta": 300.0}}, 300.0),
        # Layers of full attention without rotary positions: the added heads have ordinary ones.
        ({"full_attention": None, "sliding_attention": {"rope_theta": 300.0}}, 10000.0),
        (None, 10000.0),
    ],
)
def test_the_rotary_embedding_of_the_added_heads(parameters, theta):
    config = LlamaConfig()
    object.__setattr__(config, "rope_parameters", parameters)
    frequencies = read_spec._rotary(config, 8).frequencies
    assert frequencies == pytest.approx([theta ** (-pair / 4) for pair in range(4)])


def test_weights_of_another_class_are_no_damaged_copy(tmp_path):
    """Moshi's checkpoints hold speech beside its language model: to copy them again is no help."""
    config = shrunk(CONFIG_MAPPING["moshi"](num_hidden_layers=1, num_codebooks=2))
    MoshiForConditionalGeneration(config).save_pretrained(tmp_path)
    base = open_base(tmp_path)
    assert isinstance(base, HostedFolder)
    with pytest.raises(BaseModelError, match="expected the weights of MoshiForCausalLM") as refusal:
        base.whole(torch.float32)
    message = str(refusal.value)
    assert "\n" not in message and "copy" not in message
    assert message.endswith("none of its; use a base of another type")
