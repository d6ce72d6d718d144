"""The measures of drift, against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.observers.diagnostics import kl_divergence, mean_cosine
from pipeline.parallel.topology import SINGLE


def test_kl_divergence_equals_torchs():
    torch.manual_seed(0)
    model, base = torch.randn(7, 11), torch.randn(7, 11)
    expected = F.kl_div(model.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="sum")
    assert kl_divergence(model, base, SINGLE) == pytest.approx(float(expected), rel=1e-5)
    assert kl_divergence(base, base, SINGLE) == 0.0


def test_cosine_sees_a_rotation_but_no_scaling():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    assert mean_cosine(3 * x, x, SINGLE) == pytest.approx(1.0, abs=1e-6)
    assert mean_cosine(x + torch.randn_like(x), x, SINGLE) < 0.95
