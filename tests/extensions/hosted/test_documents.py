"""The arguments that keep documents of a row apart."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING

from pipeline.extensions.hosted.documents import document_inputs

POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 3]])
GPT_OSS = CONFIG_MAPPING["gpt_oss"](sliding_window=2)
VISIBLE = torch.tensor(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ],
    dtype=torch.bool,
)


def _inputs(separation):
    return document_inputs(separation, GPT_OSS, POSITIONS, torch.float32)


def test_positions_restart_without_a_mask_and_a_cache():
    inputs = _inputs("positions")
    assert torch.equal(inputs.pop("position_ids"), POSITIONS)
    assert inputs == {"use_cache": False}


def test_four_rows_of_positions_are_equal():
    assert torch.equal(_inputs("four_positions")["position_ids"], POSITIONS.expand(4, 1, 6))


def test_a_mask_shows_a_token_its_document_up_to_itself():
    inputs = _inputs("mask")
    assert torch.equal(inputs["position_ids"], POSITIONS)
    mask = inputs["attention_mask"]
    assert mask.shape == (1, 1, 6, 6)
    assert torch.equal(mask[0, 0] == 0, VISIBLE)
    assert mask.min() == torch.finfo(torch.float32).min


def test_layers_with_a_window_get_a_mask_of_their_own():
    masks = _inputs("layer_masks")["attention_mask"]
    assert torch.equal(masks["full_attention"][0, 0] == 0, VISIBLE)
    window = VISIBLE.triu(-1)
    assert torch.equal(masks["sliding_attention"][0, 0] == 0, window)


def test_a_row_of_one_document_needs_nothing():
    assert _inputs("one_document") == {"use_cache": False}
