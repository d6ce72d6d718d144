"""What an added attention of an exported model on a hosted base attends to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.hf.remote_code.modeling_scale_hosted import check_padding
from pipeline.hf.remote_code.scale_hosted_blocks import HostedInputs
from pipeline.hf.remote_code.scale_rotary import ScaleRotary

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


def _expected(query, key, value, past: int, known=None, documents=None):
    """By a mask of all pairs of tokens, said one by one."""
    length = query.shape[2]
    mask = torch.zeros(BATCH, 1, length, past + length, dtype=torch.bool)
    for row in range(BATCH):
        for token in range(length):
            for other in range(past + length):
                is_before = other <= past + token
                is_text = known is None or bool(known[row, other])
                is_together = documents is None or documents[token] == documents[other]
                # Padding sees itself: a row of a softmax must not be empty.
                is_itself = other == past + token
                mask[row, 0, token, other] = is_itself or (is_before and is_text and is_together)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


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
    heads = _heads(0, LENGTH)
    found = inputs.attended(*heads)
    expected = _expected(*heads, 0, documents=[0, 0, 0, 0, 1, 1, 1, 1, 1])
    torch.testing.assert_close(found, expected)
    without = _expected(*heads, 0)
    assert (found - without)[:, :, 4:].abs().max() > 0.01


@pytest.mark.parametrize("kind", PADDING)
def test_a_text_does_not_see_what_follows(kind):
    mask = torch.tensor(PADDING[kind])
    inputs = _inputs(LENGTH, 0, mask)
    query, key, value = _heads(0, LENGTH)
    found = inputs.attended(query, key, value)
    later = slice(LENGTH - 3, None)
    key[:, :, later] += 1
    value[:, :, later] += 1
    changed = inputs.attended(query, key, value)
    is_text = mask.bool()[:, None, :, None].expand_as(found).clone()
    is_text[:, :, later] = False
    assert torch.equal(found[is_text], changed[is_text])
    assert not torch.equal(found, changed)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(BATCH, 1, LENGTH, LENGTH).tril().bool(),
        torch.zeros(BATCH, 1, LENGTH, LENGTH),
        {"full_attention": None},
    ],
    ids=["of pairs", "to be added", "by kind of layer"],
)
def test_a_mask_of_pairs_is_refused(mask):
    with pytest.raises(ValueError, match=r"attention_mask: expected \[B, T\]"):
        check_padding(mask)
