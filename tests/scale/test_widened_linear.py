"""Eq. 1 of the paper, literally: the four blocks of a widened map against one dense matrix, and its
gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.open_tokens import NONE_OPEN, OpenTokens
from pipeline.parallel.topology import SINGLE
from pipeline.scale.widened_linear import Part, WidenedColumnLinear, WidenedLinear, WidenedRowLinear

SIZES = st.integers(1, 7)
# In fp64 the two ways differ by the order of at most 14 terms.
TOLERANCE = 1e-12


def widened(
    kind: type[WidenedLinear],
    sizes: tuple[int, int, int, int],
    *,
    bias: bool = False,
    collaborative: bool = True,
) -> WidenedLinear:
    """A map from (in, in_up) to (out, out_up) whose blocks are all random: a start at zero would
    hide W12."""
    size_in, size_in_up, size_out, size_out_up = sizes
    source = Part(size_in, size_in), Part(size_in_up, size_in_up)
    target = Part(size_out, size_out), Part(size_out_up, size_out_up)
    layer = kind(source, target, bias=bias, collaborative=collaborative, tp=SINGLE).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def dense_matrix(layer: WidenedLinear) -> Tensor:
    """[W W12; W21 W22]: [out + out_up, in + in_up]; W12 is zero where the layer has none."""
    w = layer.base.weight
    w21 = layer.base_to_expansion.weight
    w22 = layer.expansion_to_expansion.weight
    w12 = w.new_zeros(len(w), w22.shape[1])
    if layer.expansion_to_base is not None:
        w12 = layer.expansion_to_base.weight
    upper = torch.cat([w, w12], dim=1)
    lower = torch.cat([w21, w22], dim=1)
    return torch.cat([upper, lower])


@pytest.mark.parametrize("kind", [WidenedColumnLinear, WidenedRowLinear])
@pytest.mark.parametrize("collaborative", [True, False], ids=["adapt", "preserve"])
@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES))
def test_the_four_blocks_are_one_dense_matrix(kind, collaborative, sizes):
    layer = widened(kind, sizes, collaborative=collaborative)
    x = torch.randn(3, sizes[0], dtype=torch.float64, requires_grad=True)
    x_up = torch.randn(3, sizes[1], dtype=torch.float64, requires_grad=True)
    y, y_up = layer(x, x_up)
    found = torch.cat([y, y_up], dim=1)

    matrix = dense_matrix(layer)
    expected = torch.cat([x, x_up], dim=1) @ matrix.T
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)

    weights = torch.randn_like(expected)
    inputs = [x, x_up, *layer.parameters()]
    for own, wanted in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_biases_are_those_of_the_base_and_of_the_added_part():
    layer = widened(WidenedColumnLinear, (4, 2, 3, 5), bias=True)
    y, y_up = layer(torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(y[0], layer.base.bias)
    assert torch.equal(y_up[0], layer.base_to_expansion.bias)


def test_closed_tokens_get_the_bases_own_result_to_the_bit():
    layer = widened(WidenedColumnLinear, (6, 3, 5, 2))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    x_up = torch.randn(2, 4, 3, dtype=torch.float64)
    of_base = layer.base(x)
    adapted, _ = layer(x, x_up)
    assert not torch.equal(adapted, of_base)
    assert torch.equal(layer(x, x_up, open_tokens=NONE_OPEN)[0], of_base)

    closed = torch.tensor([[[True], [False], [True], [False]]]).expand(2, -1, -1)
    mixed, _ = layer(x, x_up, open_tokens=OpenTokens(closed=closed))
    assert torch.equal(mixed, torch.where(closed, of_base, adapted))


def test_without_an_expansion_it_is_the_base_alone():
    layer = WidenedColumnLinear((Part(4, 4), None), (Part(3, 3), None), bias=False, tp=SINGLE)
    nn.init.normal_(layer.base.weight)
    x = torch.randn(2, 4)
    y, y_up = layer(x, None)
    assert torch.equal(y, x @ layer.base.weight.T)
    assert y_up is None
