"""Pictures that a multimodal base reads, in an export with a gate: they stay the base's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma3ForConditionalGeneration

from pipeline.extensions.hosted.export import config_entries
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.model.bases import open_base
from tests.bases import copy_tokenizer
from tests.extensions.hosted.bases import PICTURE_TOKEN, gemma3_config, hosted

pytestmark = pytest.mark.full

PROMPT = [PICTURE_TOKEN] * 4 + [40, 41, 42, 43]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    """A small Gemma 3 with its vision tower; a picture is four tokens."""
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(gemma3_config()).eval()
    folder = tmp_path_factory.mktemp("bases") / "gemma3"
    model.save_pretrained(folder)
    return open_base(copy_tokenizer(folder)), model


def _export(gemma3, threshold: float):
    """An export beside which everything is random, with a gate of this threshold."""
    base, model = gemma3
    plan = hosted(base).plan
    config = HostedScaleConfig(
        **config_entries(base.spec, plan),
        gate_layer=1,
        gate_threshold=threshold,
        tie_word_embeddings=False,
    )
    export = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in export.parameters():
            parameter.normal_(std=0.1)
    export.base.load_state_dict(deepcopy(model.state_dict()))
    return export


@torch.no_grad()
def _logits(model, **options):
    torch.manual_seed(1)
    picture = torch.randn(1, 3, 28, 28)
    tokens = torch.tensor([PROMPT])
    types = (tokens == PICTURE_TOKEN).long()
    return model(
        input_ids=tokens, pixel_values=picture, token_type_ids=types, use_cache=False, **options
    )


def test_a_picture_and_closed_text_are_the_base_s_to_the_bit(gemma3):
    _, model = gemma3
    export = _export(gemma3, float("inf"))
    assert torch.equal(_logits(export).logits, _logits(model).logits)


def test_the_positions_of_a_picture_are_closed_whatever_the_gate_says(gemma3):
    _, model = gemma3
    found = _logits(_export(gemma3, float("-inf"))).logits
    expected = _logits(model).logits
    assert torch.equal(found[:, :4], expected[:, :4])
    assert (found[:, 4:] - expected[:, 4:]).abs().max() > 0.01


def test_outputs_come_as_a_tuple_with_the_loss_first(gemma3):
    export = _export(gemma3, float("-inf"))
    labels = torch.tensor([PROMPT])
    named = _logits(export, labels=labels)
    found = _logits(export, labels=labels, return_dict=False)
    assert isinstance(found, tuple)
    assert torch.equal(found[0], named.loss)
    assert torch.equal(found[1], named.logits)
