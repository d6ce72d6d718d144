"""The linear map of every expert in one product: that of each expert alone, also with weights in 8
and 4 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pipeline.parallel.experts import grouped_product, has_grouped_product, product_of_each
from pipeline.parallel.layers import ExpertLinear
from pipeline.parallel.parameters import quantization_of
from pipeline.parallel.quantized import fill_quantized, read_partition, rounded, stored_parameter
from pipeline.parallel.sharding import split
from pipeline.parallel.topology import SINGLE, TensorParallel

EXPERTS, IN, OUT = 5, 128, 24
ENDS = torch.tensor([3, 3, 4, 17, 23], dtype=torch.int32)
"""No row is the second expert's, one the third's."""


def some(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_for_all_experts_is_that_of_each_alone(dtype):
    assert has_grouped_product("cpu", dtype), "the loop would be compared with itself"
    weights, found = some(EXPERTS, OUT, IN).to(dtype), []
    for product in (grouped_product, product_of_each):
        x = some(23, IN, seed=1).to(dtype).requires_grad_()
        y = product(x, weights, ENDS)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad))
    rows = found[0][0][17:]
    torch.testing.assert_close(rows, F.linear(some(23, IN, seed=1).to(dtype)[17:], weights[4]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["fp8", "nf4"])
@pytest.mark.parametrize("dim", [1, 2])
def test_experts_in_few_bits_are_the_same_at_every_split(precision, dim):
    whole = some(EXPERTS, OUT, IN)
    expected = rounded(whole, precision, scaling="row")
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        linear = ExpertLinear(EXPERTS, IN, OUT, dim=dim, tp=tp).requires_grad_(False)
        linear.weight = weight = stored_parameter(linear.weight, precision, "w", 2)
        held = split(whole, read_partition(weight), rank, 2)
        fill_quantized(weight, tp, lambda rows, held=held: held[slice(*rows)])
        shard = split(
            expected,
            ExpertLinear(EXPERTS, IN, OUT, dim=dim, tp=SINGLE).weight.tp_partition,
            rank,
            2,
        )
        decoded = quantization_of(weight).decode(weight, torch.float32).view_as(shard)
        assert torch.equal(decoded, shard)
        x = some(23, shard.shape[2], seed=1).requires_grad_()
        y, plain = linear(x, ENDS), partial(product_of_each, weights=shard, ends=ENDS)
        torch.testing.assert_close(y, plain(x))
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(gradient, *torch.autograd.grad(plain(x).square().sum(), x))
