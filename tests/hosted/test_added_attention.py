"""What an added attention of an exported model on a hosted base attends to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.hf.remote_code.scale_hosted_blocks import HostedInputs, _visible
from pipeline.hf.remote_code.scale_layer import ScaleRotary

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 2, 9, 8
PADDING = {
    "left": [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 0, 0, 0, 0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 9, [1, 0, 0, 0, 0, 0, 0, 0, 0]],
    "both": [[0, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9, [0, 0, 0, 1, 1, 0, 0, 0, 0]],
}


def _inputs(length: int, past: int, mask, positions=None) -> HostedInputs:
    rotary = ScaleRotary(
        {
            "frequencies": [1.0, 0.1],
            "long_frequencies": None,
            "context": None,
            "attention_factor": 1.0,
        }
    )
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    return HostedInputs(tokens, past, mask, positions, rotary, torch.float32)


def _heads(past: int, length: int):
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, length, HEAD_DIM)
    key = torch.randn(BATCH, HEADS, past + length, HEAD_DIM)
    return query, key, torch.randn_like(key)


def _expected(query, key, value, past: int, known, documents=None):
    """By a mask of all pairs of tokens."""
    place = torch.arange(key.shape[2])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=_visible(place, past, known, documents)
    )


@pytest.mark.parametrize("kind", PADDING)
def test_a_prompt_attends_to_its_text_as_by_a_mask_without_making_one(kind):
    mask = torch.tensor(PADDING[kind])
    inputs = _inputs(LENGTH, 0, mask)
    assert inputs.visible is None
    heads = _heads(0, LENGTH)
    found = inputs.attended(*heads)
    expected = _expected(*heads, 0, mask.bool())
    is_text = mask.bool()[:, None, :, None].expand_as(found)
    torch.testing.assert_close(found[is_text], expected[is_text])
    assert found.isfinite().all()


@pytest.mark.parametrize(("past", "length"), [(0, LENGTH), (0, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_attend_to_all_before_them(past, length, padded):
    known = None
    if padded:
        known = torch.ones(BATCH, past + length, dtype=torch.bool)
        known[0, 0] = past + length == 1
    inputs = _inputs(length, past, known)
    if length == 1 and not padded:
        assert inputs.visible is None
    heads = _heads(past, length)
    expected = _expected(*heads, past, known)
    found = inputs.attended(*heads)
    if past == 0 and padded:
        # A row of padding alone has no result that anyone reads.
        found = found[:, :, 1:]
        expected = expected[:, :, 1:]
    torch.testing.assert_close(found, expected)


def test_positions_that_begin_again_are_another_document():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(BATCH, -1)
    inputs = _inputs(LENGTH, 0, None, positions)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    heads = _heads(0, LENGTH)
    found = inputs.attended(*heads)
    torch.testing.assert_close(found, _expected(*heads, 0, None, documents))
    without = _expected(*heads, 0, None)
    assert (found - without)[:, :, 4:].abs().max() > 0.01
