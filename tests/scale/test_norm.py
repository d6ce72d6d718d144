"""Normalisation of two streams, against its formula written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.scale.widened_norm import WidenedNorm

EPS = 1e-5


def norm_of(kind, statistics):
    norm = WidenedNorm(kind, 32, 12, eps=EPS, statistics=statistics)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return norm


def streams():
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(2, 5, 32, generator=generator) + 1, torch.randn(
        2, 5, 12, generator=generator
    ) - 2


@pytest.mark.parametrize("statistics", ["separate", "base"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_the_formula_of_both_streams(kind, statistics):
    norm, (x, x_up) = norm_of(kind, statistics), streams()
    y, y_up = norm(x, x_up)
    source, base = x if statistics == "base" else x_up, norm.base
    if kind == "rmsnorm":
        expected = (
            x_up / (source.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.expansion.weight
        )
        of_base = F.rms_norm(x, (32,), base.weight, EPS)
    else:
        mean, variance = source.mean(-1, keepdim=True), source.var(-1, keepdim=True, correction=0)
        expected = (x_up - mean) / (
            variance + EPS
        ).sqrt() * norm.expansion.weight + norm.expansion.bias
        of_base = F.layer_norm(x, (32,), base.weight, base.bias, EPS)
    torch.testing.assert_close(y_up, expected)
    torch.testing.assert_close(y, of_base)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_sixteen_bit_streams_are_normalised_in_fp32(kind):
    """Squares of large activations overflow half precision; their mean must not."""
    norm, (x, x_up) = norm_of(kind, "base").half(), streams()
    y, y_up = norm((300 * x).half(), (300 * x_up).half())
    assert y.dtype == y_up.dtype == torch.float16
    assert y.isfinite().all()
    assert y_up.isfinite().all()
    assert y.abs().max() < 10
