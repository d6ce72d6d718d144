"""Frozen matrices in 8 and 4 bits: bitsandbytes' numbers, the same shards at every split, and exact
products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from pipeline.errors import ConfigError
from pipeline.parallel.quantized import (
    BLOCK,
    Quantization,
    QuantizedPrecision,
    fill_quantized,
    frozen_product,
    product_in_fp8,
    quantization_of,
    read_partition,
    rounded,
    stored_parameter,
)
from pipeline.parallel.sharding import Partition, local_shape, sharded_parameter, split
from pipeline.parallel.topology import TensorParallel

PRECISIONS = get_args(QuantizedPrecision)


def some_matrix(rows, columns, dtype=torch.float32, seed=0):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return matrix.to(dtype)


def stored(matrix, precision):
    quantization = Quantization(precision, *matrix.shape)
    memory = torch.empty(quantization.size, dtype=torch.uint8)
    quantization.write(memory, matrix)
    return memory, quantization


def read_rows(matrix, parameter, rank, size, rows):
    return split(matrix, read_partition(parameter), rank, size)[slice(*rows)]


BY_BITSANDBYTES = "8461eebadfd77264"
"""The start of the SHA-256 of what bitsandbytes 0.50.2 makes of the matrix below: codes, scales,
and values in bf16."""


def test_nf4_is_that_of_bitsandbytes_bit_for_bit():
    numbers = torch.arange(48 * 3 * BLOCK, dtype=torch.int64)
    matrix = (
        (numbers * numbers * 69069 % 2**32 * 40503 % 2**32)
        .double()
        .div(2**32)
        .sub(0.5)
        .float()
        .view(48, -1)
    )
    matrix[3, :BLOCK] = 0
    matrix[4, 5] = 9.0
    memory, quantization = stored(matrix, "nf4")
    parts = (
        quantization.codes(memory),
        quantization.scales(memory),
        quantization.decode(memory, torch.bfloat16),
    )
    found = sha256(
        b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    ).hexdigest()
    assert found.startswith(BY_BITSANDBYTES)


def test_fp8_rounds_each_row_to_three_bits_of_mantissa():
    matrix = some_matrix(16, 80)
    matrix[2] = 0
    decoded = rounded(matrix, "fp8")
    largest = matrix.abs().amax(1, keepdim=True)
    # Half a unit in the last place, or of the smallest numbers below normal ones: 448 is the
    # largest in e4m3.
    assert (
        (decoded - matrix).abs()
        <= torch.maximum(matrix.abs() * 2**-4, largest / 448 * 2**-10) * 1.001
    ).all()
    torch.testing.assert_close(decoded.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)


@given(
    precision=st.sampled_from(PRECISIONS),
    dim=st.sampled_from([0, 1, None]),
    size=st.sampled_from([1, 2, 4]),
    units=st.sampled_from([1, 2, 4, 8]),
    unit=st.integers(1, 3),
    other=st.integers(1, 150),
)
def test_shards_are_those_of_the_whole_matrix(precision, dim, size, units, unit, other):
    """Also where neighbours hold the same shard, the last block is short, and rows are of an odd
    length."""
    split_size = units * unit * (BLOCK if dim == 1 and size > 1 else 5)
    shape = (other, split_size) if dim == 1 else (split_size, other)
    matrix = some_matrix(*shape)
    expected = rounded(matrix, precision)
    partition = Partition(dim=dim, units=units)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        ordinary = sharded_parameter(shape, partition, tp).requires_grad_(False)
        parameter = stored_parameter(ordinary, precision, "w", size)
        fill_quantized(parameter, tp, partial(read_rows, matrix, parameter, rank, size))
        quantization = quantization_of(parameter)
        assert (quantization.rows, quantization.columns) == local_shape(shape, partition, size)
        assert torch.equal(
            quantization.decode(parameter, torch.float32), split(expected, partition, rank, size)
        )


def test_what_is_cast_or_moved_keeps_its_bytes():
    ordinary = sharded_parameter((6, 70), Partition(0), TensorParallel()).requires_grad_(False)
    parameter = stored_parameter(ordinary, "fp8", "w", 1)
    matrix = some_matrix(6, 70)
    fill_quantized(parameter, TensorParallel(), lambda rows: matrix[slice(*rows)])
    module = torch.nn.Module()
    module.register_parameter("weight", parameter)
    module.bfloat16().to("cpu").half()
    quantization = quantization_of(module.weight)
    assert torch.equal(quantization.decode(module.weight, torch.float32), rounded(matrix, "fp8"))


@pytest.mark.parametrize(("precision", "dtype"), [("nf4", torch.float32), ("fp8", torch.bfloat16)])
def test_a_product_is_that_of_the_decoded_matrix_and_keeps_only_bytes(precision, dtype):
    matrix, bias = some_matrix(24, 100), some_matrix(1, 24)[0].to(dtype)
    memory, quantization = stored(matrix, precision)
    decoded = quantization.decode(memory, dtype)
    x = some_matrix(10, 100, dtype, seed=1).view(2, 5, 100)
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    results = []
    for product in (
        partial(frozen_product, stored=memory, quantization=quantization),
        partial(F.linear, weight=decoded),
    ):
        own = x.clone().requires_grad_()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            y = product(own, bias=bias)
        y.square().sum().backward()
        results.append((y.detach(), own.grad))
        if len(results) == 1:
            # What `square` saves is y.
            assert [tensor.dtype for tensor in saved if tensor.shape != y.shape] == [torch.uint8]
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)
    with torch.no_grad():
        assert not frozen_product(x, memory, quantization, None).requires_grad
    assert not frozen_product(x, memory, quantization, None).requires_grad


def test_the_product_in_fp8_rounds_activations_row_by_row():
    """The path of Hopper GPUs; torch computes it on a CPU, too."""
    matrix, bias = some_matrix(32, 64), some_matrix(1, 32)[0].bfloat16()
    memory, quantization = stored(matrix, "fp8")
    x = some_matrix(6, 64, torch.bfloat16, seed=1).view(2, 3, 64)
    x[0, 1] *= 1000
    x[1, 2] = 0
    y = product_in_fp8(x, memory, quantization, bias)
    expected = F.linear(rounded(x.flatten(0, 1), "fp8"), rounded(matrix, "fp8"), bias.float()).view(
        2, 3, 32
    )
    torch.testing.assert_close(
        y.float(), expected, rtol=2**-7, atol=2**-9 * float(bias.abs().max())
    )
    alone = product_in_fp8(x[:1, 1:2], memory, quantization, bias)
    assert torch.equal(alone, y[:1, 1:2])

    own = x.clone().requires_grad_()
    of_hopper = frozen_product(own, memory, replace(quantization, fp8_device="cpu"), bias)
    assert torch.equal(of_hopper, y)
    of_hopper.sum().backward()
    decoded = quantization.decode(memory, torch.bfloat16)
    assert torch.equal(own.grad, torch.ones_like(y) @ decoded)


def test_what_cannot_be_stored_is_refused():
    tp = TensorParallel(0, 4)
    trained = sharded_parameter((8, 3 * 64), Partition(1, units=12), tp)
    with pytest.raises(ConfigError, match=r"w trains, .* set base_precision: bf16"):
        stored_parameter(trained, "fp8", "w", 4)
    with pytest.raises(
        ConfigError, match=r"64 columns, which parallel.tp_size 4 would cut in w with 192 columns"
    ):
        stored_parameter(trained.requires_grad_(False), "nf4", "w", 4)
    assert stored_parameter(trained, "fp8", "w", 4).numel() == 8 * 48 + 8 * 4
