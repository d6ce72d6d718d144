"""Frozen matrices in 8 and 4 bits: bitsandbytes' numbers, the same shards at every split, and exact
products."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from pipeline.config.base import Fp8Scaling, GradientPrecision
from pipeline.errors import ConfigError
from pipeline.parallel import quantized
from pipeline.parallel.parameters import quantization_of, sharded_parameter
from pipeline.parallel.quantized import (
    BLOCK,
    DEFAULT_RECIPE,
    FP8,
    Fp8Recipe,
    Quantization,
    computes_in_fp8,
    fill_quantized,
    frozen_product,
    read_partition,
    rounded,
    stored_parameter,
)
from pipeline.parallel.sharding import Partition, local_shape, split
from pipeline.parallel.topology import TensorParallel

FORMS = [("nf4", "tensor"), ("fp8", "tensor"), ("fp8", "row")]
"""Precisions, and what shares a scale in fp8."""


def some_matrix(rows, columns, dtype=torch.float32, seed=0):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return matrix.to(dtype)


def stored(matrix, precision, scaling="tensor", **products):
    quantization = Quantization(precision, *matrix.shape, scaling, **products)
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


@pytest.mark.parametrize("scaling", get_args(Fp8Scaling))
def test_fp8_rounds_to_three_bits_of_mantissa(scaling):
    matrix = some_matrix(16, 80)
    matrix[2] = 0
    decoded = rounded(matrix, "fp8", scaling)
    largest = matrix.abs().amax(1, keepdim=True)
    if scaling == "tensor":
        largest = matrix.abs().amax()
    # Half a unit in the last place, or of the smallest numbers below normal ones: 448 is the
    # largest in e4m3, and a scale that is a power of two may be twice as large as it need be.
    smallest = 2 * largest / 448 * 2**-10
    bound = torch.maximum(matrix.abs() * 2**-4, smallest) * 1.001
    assert ((decoded - matrix).abs() <= bound).all()
    if scaling == "row":
        torch.testing.assert_close(decoded.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)


def test_one_scale_is_a_power_of_two_and_what_is_decoded_has_few_bits():
    for factor in (1e-30, 0.37, 448.0, 1e20):
        matrix = some_matrix(16, 80) * factor
        memory, quantization = stored(matrix, "fp8")
        scale = quantization.scales(memory)
        mantissa, _ = torch.frexp(scale)
        assert mantissa.tolist() == [[0.5]]
        largest = matrix.abs().max() / scale
        assert 224 < largest <= 448 or factor == 1e-30
        # So a matrix is decoded to bf16 without rounding.
        decoded = quantization.decode(memory, torch.bfloat16)
        assert torch.equal(decoded.float(), quantization.decode(memory, torch.float32))


@given(
    form=st.sampled_from(FORMS),
    dim=st.sampled_from([0, 1, None]),
    size=st.sampled_from([1, 2, 4]),
    units=st.sampled_from([1, 2, 4, 8]),
    unit=st.integers(1, 3),
    other=st.integers(1, 150),
)
def test_shards_are_those_of_the_whole_matrix(form, dim, size, units, unit, other):
    """Also where neighbours hold the same shard, the last block is short, and rows are of an odd
    length."""
    precision, scaling = form
    recipe = Fp8Recipe(scaling)
    split_size = units * unit * (BLOCK if dim == 1 and size > 1 else 5)
    shape = (other, split_size) if dim == 1 else (split_size, other)
    matrix = some_matrix(*shape)
    expected = rounded(matrix, precision, scaling)
    partition = Partition(dim=dim, units=units)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        ordinary = sharded_parameter(shape, partition, tp).requires_grad_(False)
        parameter = stored_parameter(ordinary, precision, "w", size, recipe)
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


def by_token(x, fp8_type):
    """x with each row rounded to `fp8_type`, by a scale of its own that is a power of two."""
    largest = x.abs().amax(-1, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(fp8_type).max)))
    return ((x.double() / scale).float().to(fp8_type).double() * scale).float()


ON_CPU = {"fp8_devices": ("cpu",)}


def some_activations():
    x = some_matrix(6, 64, torch.bfloat16, seed=1).view(2, 3, 64)
    x[0, 1] *= 1000
    x[1, 2] = 0
    return x


@pytest.mark.parametrize("scaling", get_args(Fp8Scaling))
def test_the_product_in_fp8_rounds_activations_token_by_token(scaling):
    """What Hopper GPUs compute; torch computes it on a CPU, too."""
    matrix, bias = some_matrix(32, 64), some_matrix(1, 32)[0].bfloat16()
    memory, quantization = stored(matrix, "fp8", scaling, **ON_CPU)
    x = some_activations()
    y = frozen_product(x, memory, quantization, bias)
    rounded_x = by_token(x, FP8)
    if scaling == "row":
        rounded_x = rounded(x.flatten(0, 1), "fp8", "row").view(x.shape)
    expected = F.linear(rounded_x, rounded(matrix, "fp8", scaling), bias.float())
    if scaling == "tensor":
        # Nothing but the sum is rounded: not the scales, which are multiplied behind the product.
        product = F.linear(rounded_x, rounded(matrix, "fp8", scaling)).bfloat16()
        assert torch.equal(y, product + bias)
    torch.testing.assert_close(
        y.float(), expected, rtol=2**-7, atol=2**-9 * float(bias.abs().max())
    )


@pytest.mark.parametrize("scaling", get_args(Fp8Scaling))
def test_a_token_has_the_same_product_whatever_stands_beside_it(scaling):
    """Text that a gate leaves closed keeps the base's numbers, also beside an outlier."""
    memory, quantization = stored(some_matrix(32, 64), "fp8", scaling, **ON_CPU)
    x = some_activations()
    y = frozen_product(x, memory, quantization)
    assert torch.equal(frozen_product(x[:1, 1:2], memory, quantization), y[:1, 1:2])
    x[0, 2] *= -3e4
    beside = frozen_product(x, memory, quantization)
    changed = (beside != y).any(-1)
    assert changed.tolist() == [[False, False, True], [False, False, False]]


@pytest.mark.parametrize("gradient", get_args(GradientPrecision))
@pytest.mark.parametrize("scaling", get_args(Fp8Scaling))
def test_the_gradient_of_a_product_in_fp8(scaling, gradient):
    matrix = some_matrix(32, 64)
    memory, quantization = stored(matrix, "fp8", scaling, gradient=gradient, **ON_CPU)
    x = some_activations().requires_grad_()
    of_y = some_matrix(6, 32, torch.bfloat16, seed=2).view(2, 3, 32)
    of_y[1, 0] *= 1e-6
    frozen_product(x, memory, quantization).backward(of_y)
    if gradient == "bf16":
        expected = of_y @ quantization.decode(memory, torch.bfloat16)
    elif scaling == "tensor":
        rounded_gradient = by_token(of_y, getattr(torch, f"float8_{GRADIENT_TYPES[gradient]}"))
        expected = (rounded_gradient @ rounded(matrix, "fp8")).bfloat16()
    else:
        # The scales of W's rows are part of the gradient that is rounded.
        codes = quantization.codes(memory).view(FP8).float()
        scaled = of_y.float() * quantization.scales(memory).t()
        rounded_gradient = by_token(scaled, getattr(torch, f"float8_{GRADIENT_TYPES[gradient]}"))
        expected = (rounded_gradient @ codes).bfloat16()
    assert torch.equal(x.grad, expected)


GRADIENT_TYPES = {"e4m3": "e4m3fn", "e5m2": "e5m2"}


def devices(rows, columns, recipe=DEFAULT_RECIPE, tp_size=1):
    """The devices that multiply in fp8 by a matrix whose rows are split over `tp_size` ranks."""
    with torch.device("meta"):
        tp = TensorParallel(0, tp_size)
        matrix = sharded_parameter((rows, columns), Partition(0, units=tp_size), tp)
    form = stored_parameter(matrix.requires_grad_(False), "fp8", "w", tp_size, recipe)
    return quantization_of(form).fp8_devices


def test_which_products_are_in_fp8():
    """Those of matrices whose sides are multiples of 16, and not small; in bf16 alone."""
    small = Fp8Recipe(skip_small=False)

    assert "cpu" in devices(4096, 4096)
    assert "cpu" in devices(1024, 14336)
    assert devices(1024, 4096) == devices(4096, 1024) == devices(4096, 4104) == ()
    assert "cpu" in devices(1024, 4096, small)
    memory, quantization = stored(some_matrix(32, 64), "fp8", **ON_CPU)
    x = some_activations().float()
    decoded = quantization.decode(memory, torch.float32)
    assert torch.equal(frozen_product(x, memory, quantization), F.linear(x, decoded))


def test_a_matrix_is_small_or_not_at_every_tensor_parallel_size():
    """So that a run computes the same function of its base in every layout."""
    for tp_size in (1, 8):
        assert "cpu" in devices(4096, 4096, tp_size=tp_size)
        assert devices(1024, 4096, tp_size=tp_size) == ()
    # The kernel takes no shard whose sides are no multiples of 16: it is decoded.
    assert "cpu" in devices(4096 + 64, 4096)
    assert devices(4096 + 64, 4096, tp_size=8) == ()


@pytest.fixture
def probed_anew():
    """`computes_in_fp8` forgets what it found, before a test and after it."""
    computes_in_fp8.cache_clear()
    yield
    computes_in_fp8.cache_clear()


@pytest.mark.parametrize("lacking", ["float8_e4m3fn", "float8_e5m2"])
def test_a_device_without_a_product_of_either_direction_decodes(lacking, probed_anew, monkeypatch):
    """Gradients in e5m2 are another kernel than activations in e4m3."""
    assert computes_in_fp8("cpu")
    computes_in_fp8.cache_clear()
    product = torch._scaled_mm

    def without(x, *args, **kwargs):
        if x.dtype == getattr(torch, lacking):
            raise RuntimeError("Multiplication of two Float8 matrices is not supported")
        return product(x, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", without)
    assert not computes_in_fp8("cpu")


def test_the_meta_device_stands_for_this_machines_gpu(monkeypatch):
    """Estimates are for the GPU at hand; without one, for a Hopper."""
    assert devices(4096, 4096) == ("cpu", "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), ("cpu",)), ((9, 0), ("cpu", "meta", "cuda"))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        monkeypatch.setattr(quantized, "computes_in_fp8", lambda device: True)
        assert devices(4096, 4096) == expected


def test_what_cannot_be_stored_is_refused():
    tp = TensorParallel(0, 4)
    trained = sharded_parameter((8, 3 * 64), Partition(1, units=12), tp)
    with pytest.raises(ConfigError, match=r"w trains, .* set base_precision: bf16"):
        stored_parameter(trained, "fp8", "w", 4)
    with pytest.raises(
        ConfigError, match=r"64 columns, which parallel.tp_size 4 would cut in w with 192 columns"
    ):
        stored_parameter(trained.requires_grad_(False), "nf4", "w", 4)
    assert stored_parameter(trained, "fp8", "w", 4).numel() == 8 * 48 + 4
    by_rows = stored_parameter(trained, "fp8", "w", 4, Fp8Recipe("row"))
    assert by_rows.numel() == 8 * 48 + 8 * 4
