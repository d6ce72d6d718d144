"""Packed documents: what a token's logits may depend on."""

from __future__ import annotations

import pytest
import torch

from tests.bases import CONFIGS
from tests.tolerances import assert_near, rounding_of
from tests.widened import packed, scale_settings, some_tokens, unwidened, widened

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
