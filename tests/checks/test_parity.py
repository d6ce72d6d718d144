"""A base's logits compared with transformers': what the comparison itself must not miss."""

from __future__ import annotations

import math

import pytest

from pipeline.checks import parity
from pipeline.errors import BaseModelError
from pipeline.model.from_hf import open_base
from tests.bases import STORIES


def test_a_nan_in_the_last_text_is_found(monkeypatch):
    compute = parity._logits_by_this_package

    def with_nan(*arguments):
        logits = compute(*arguments)
        assert len(logits) > 1
        logits[-1][0, 0] = math.nan
        return logits

    base = open_base(STORIES)
    parity.check_against_transformers(base)
    monkeypatch.setattr(parity, "_logits_by_this_package", with_nan)
    with pytest.raises(BaseModelError, match="differ from those of transformers by nan"):
        parity.check_against_transformers(base)
