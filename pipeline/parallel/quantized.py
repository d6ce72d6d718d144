"""A frozen matrix stored in 8 or 4 bits, and its product with activations.

The stored form is one tensor of bytes: the codes of the elements, row after row, then their scales
in fp32. Bytes survive what DeepSpeed and `Module.to` do to weights of a floating-point type: they
would cast the scales to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.parallel.experts import grouped_product
from pipeline.parallel.sharding import (
    Partition,
    Rows,
    full_shape_of,
    local_shape,
    partition_of,
)
from pipeline.parallel.topology import TensorParallel

QuantizedPrecision = Literal["fp8", "nf4"]
FP8 = torch.float8_e4m3fn
BLOCK = 64
"""Columns that share a scale in nf4."""
# The quantiles of a normal distribution (Dettmers et al. 2023), as bitsandbytes rounds them.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TABLE_BYTES = 256 * 2 * 4
_ALIGNED = 16
"""Where scales may begin; the matrix product in fp8 wants dimensions that are multiples of it,
too."""
_ENCODED = 2**20
"""Elements that are encoded at a time: their copies in fp32 stay in a processor's cache."""


@dataclass(frozen=True)
class Quantization:
    """How a matrix [rows, columns] is stored.

    fp8: e4m3, with a scale for each row. nf4: 4 bits with a scale for each block of 64 columns,
    packed and decoded as by bitsandbytes; after the scales comes the table of the two values of
    each byte, because a table made on the host would be a copy to the device in every product.

    `fp8_device`: the type of the devices that compute products in fp8, if any: a field, because a
    layer that is compiled cannot ask for a GPU's generation.
    """

    precision: QuantizedPrecision
    rows: int
    columns: int
    fp8_device: str | None = None

    @property
    def blocks(self) -> int:
        """The number of scales of a row."""
        if self.precision == "fp8":
            return 1
        return -(-self.columns // BLOCK)  # rounded up

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's codes; in nf4 the last block is padded with zeros."""
        if self.precision == "fp8":
            return self.columns
        return self.blocks * BLOCK // 2

    @property
    def _scales_at(self) -> int:
        return -(-self.rows * self.row_bytes // _ALIGNED) * _ALIGNED

    @property
    def _table_at(self) -> int:
        return self._scales_at + self.rows * self.blocks * 4

    @property
    def size(self) -> int:
        """The bytes of the stored form: codes, scales, and in nf4 the table."""
        if self.precision == "nf4":
            return self._table_at + _TABLE_BYTES
        return self._table_at

    def codes(self, stored: Tensor) -> Tensor:
        """A view of `stored`: uint8 [rows, row_bytes]."""
        return stored[: self.rows * self.row_bytes].view(self.rows, self.row_bytes)

    def scales(self, stored: Tensor) -> Tensor:
        """A view of `stored`: fp32 [rows, blocks]."""
        stored_scales = stored[self._scales_at : self._table_at]
        return stored_scales.view(torch.float32).view(self.rows, self.blocks)

    def _table(self, stored: Tensor) -> Tensor:
        """A view of `stored`: fp32 [256, 2], the two values of each byte."""
        return stored[self._table_at :].view(torch.float32).view(256, 2)

    def write(self, stored: Tensor, matrix: Tensor, left: int = 0) -> None:
        """Encodes whole rows, `matrix` [rows, ...], and stores their codes from byte `left` on."""
        codes = self.codes(stored)
        scales = self.scales(stored)
        # In parts: a whole matrix in fp32 beside its codes would need five times the memory of the
        # stored form in fp8.
        rows_at_once = max(1, _ENCODED // self.columns)
        for first in range(0, len(matrix), rows_at_once):
            rows = slice(first, first + rows_at_once)
            own_codes, scales[rows] = encode(matrix[rows], self.precision)
            codes[rows] = own_codes[:, left : left + self.row_bytes]
        if self.precision == "nf4":
            values = torch.tensor(_NF4)
            self._table(stored).copy_(torch.cartesian_prod(values, values))

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix in `dtype`: [rows, columns]; computed in fp32 and rounded once."""
        codes = self.codes(stored)
        scales = self.scales(stored)
        if self.precision == "fp8":
            return (codes.view(FP8).float() * scales).to(dtype)
        # One look-up gives both values of a byte, the high four bits first, as bitsandbytes packs
        # them.
        values = F.embedding(codes.int(), self._table(stored)).view(self.rows, self.blocks, BLOCK)
        return (values * scales.unsqueeze(-1)).to(dtype).flatten(1)[:, : self.columns]


def encode(matrix: Tensor, precision: QuantizedPrecision) -> tuple[Tensor, Tensor]:
    """Encodes whole rows [rows, columns].

    Returns their codes, uint8 [rows, row_bytes], and scales, fp32 [rows, blocks]. A scale depends
    on the whole row, or block. So what is stored of an element is the same however rows are split.
    """
    matrix = matrix.float()
    if precision == "fp8":
        scales = _fp8_scales(matrix)
        # The cast rounds to the nearest; it needs no clamp, since the row's largest element becomes
        # the largest number of e4m3, 448.
        return (matrix / scales).to(FP8).view(torch.uint8), scales
    blocks = F.pad(matrix, (0, -matrix.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    # Multiplied by the reciprocal, as bitsandbytes does: a division rounds otherwise, and some
    # codes would differ from its own. The clamp keeps blocks of zeros zero.
    scaled = (blocks * (1 / scales.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    values = torch.tensor(_NF4)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    bounds = (values[1:] + values[:-1]) / 2
    # Counting the bounds below an element is several times as fast as a binary search.
    for bound in bounds.tolist():
        codes += scaled > bound
    codes = codes.flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _fp8_scales(matrix: Tensor) -> Tensor:
    """The scale of each row [rows, columns]: fp32 [rows, 1].

    It makes the row's largest element the largest number in fp8.
    """
    return matrix.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FP8).max


def rounded(matrix: Tensor, precision: QuantizedPrecision) -> Tensor:
    """`matrix` [..., columns] stored in `precision` and decoded: what a model computes with, in
    fp32."""
    flat = matrix.flatten(0, -2)
    quantization = Quantization(precision, *flat.shape)
    stored = torch.empty(quantization.size, dtype=torch.uint8)
    quantization.write(stored, flat)
    return quantization.decode(stored, torch.float32).view(matrix.shape)


def quantization_of(parameter: Tensor) -> Quantization | None:
    """How `parameter` is stored; None for an ordinary one."""
    return getattr(parameter, "quantization", None)


def stored_parameter(
    parameter: nn.Parameter, precision: QuantizedPrecision, name: str, tp_size: int
) -> nn.Parameter:
    """The stored form, unset, of this rank's shard of the frozen matrix `parameter`.

    The matrices of all experts [experts, out, in] are stored as one, with experts · out rows.

    Args:
        parameter: the matrix, or all experts' matrices.
        precision: the form.
        name: what messages call it.
        tp_size: the number of tensor-parallel ranks.

    Raises:
        ConfigError: `parameter` trains, or the split over the ranks cuts blocks.
    """
    if parameter.requires_grad:
        raise ConfigError(
            f"base_precision: {name} trains, which a matrix in {precision} cannot; set "
            "base_precision: bf16, or take method scale or lora"
        )
    shape = full_shape_of(parameter)
    partition = partition_of(parameter)
    *rows_of, columns = local_shape(shape, partition, tp_size)
    if precision == "nf4" and columns < shape[-1] and columns % BLOCK:
        raise ConfigError(
            f"base_precision: nf4 has blocks of {BLOCK} columns, which parallel.tp_size {tp_size} "
            f"would cut in {name} with {shape[-1]} columns; take a smaller parallel.tp_size, or fp8"
        )
    rows = prod(rows_of)
    is_aligned = rows % _ALIGNED == 0 and columns % _ALIGNED == 0
    fp8_device: str | None = None
    # The product in fp8 takes one matrix, not all experts'.
    if precision == "fp8" and len(shape) == 2 and is_aligned and not parameter.is_meta:
        fp8_device = "cuda" if _gpu_computes_in_fp8() else None
    quantization = Quantization(precision, rows, columns, fp8_device)
    stored: Any = nn.Parameter(
        torch.empty(quantization.size, dtype=torch.uint8, device=parameter.device),
        requires_grad=False,
    )
    stored.quantization = quantization
    stored.tp_partition = partition
    stored.full_shape = shape
    stored.tensor_model_parallel = parameter.tensor_model_parallel  # type: ignore[attr-defined]
    return stored


def _gpu_computes_in_fp8() -> bool:
    """Whether this rank's GPU computes products in fp8.

    Hopper does, later ones if this torch has kernels for them.
    """
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return is_hopper and computes_in_fp8("cuda")


@cache
def computes_in_fp8(device: str) -> bool:
    """Whether torch has a product in fp8 with a scale for each row for the device, by trying
    one."""
    quantization = Quantization("fp8", _ALIGNED, _ALIGNED)
    stored = torch.empty(quantization.size, dtype=torch.uint8, device=device)
    ones = torch.ones(_ALIGNED, _ALIGNED, dtype=torch.bfloat16, device=device)
    quantization.write(stored, ones)
    try:
        product = product_in_fp8(ones, stored, quantization, None)
    except (RuntimeError, ValueError):  # what torch raises depends on its version
        return False
    return torch.equal(product, _ALIGNED * ones)


def read_partition(parameter: Tensor) -> Partition:
    """How the matrix is split that a rank reads to quantise its shard of `parameter`.

    A scale of fp8 depends on a whole row. So where rows are cut, every rank reads all of them.
    """
    quantization = quantization_of(parameter)
    assert quantization is not None
    partition = partition_of(parameter)
    splits_columns = partition.dim == len(full_shape_of(parameter)) - 1
    if splits_columns and quantization.precision == "fp8":
        return replace(partition, dim=None)
    return partition


@torch.no_grad()
def fill_quantized(parameter: Tensor, tp: TensorParallel, read: Callable[[Rows], Tensor]) -> None:
    """Sets this rank's shard of a quantised `parameter`.

    `read` returns rows of the matrix that is split as `read_partition` says.
    """
    quantization = quantization_of(parameter)
    assert quantization is not None
    shape = full_shape_of(parameter)
    rows, *_ = local_shape(shape, read_partition(parameter), tp.size)
    matrix = read((0, rows)).flatten(0, -2)
    left = 0
    if matrix.shape[1] != quantization.columns:
        # Whole rows were read, of which this rank keeps its columns.
        left, _ = partition_of(parameter).bounds(shape[-1], tp.rank, tp.size)
    quantization.write(parameter, matrix, left)


def frozen_product(
    x: Tensor,
    stored: Tensor,
    quantization: Quantization,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """`W x + b` with a stored W: [out, in] and a frozen b: [out]. x: [..., in] -> [..., out].

    With `ends` W holds the maps of all experts, as in `grouped_product`. On GPUs from Hopper on for
    which torch has the kernel, a product with fp8 in bf16 is computed in fp8, with a scale for each
    row of x; elsewhere W is decoded. The backward pass decodes it again, so that only its bytes are
    held between the two.
    """
    product: Tensor = _FrozenProduct.apply(x, stored, bias, ends, quantization)
    return product


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        bias: Tensor | None,
        ends: Tensor | None,
        quantization: Quantization,
    ) -> Tensor:
        # x is not saved: W is frozen, so that no gradient needs it.
        ctx.save_for_backward(stored, ends)
        ctx.quantization = quantization
        if x.device.type == quantization.fp8_device and x.dtype == torch.bfloat16:
            return product_in_fp8(x, stored, quantization, bias)
        weights = quantization.decode(stored, x.dtype)
        if ends is None:
            return F.linear(x, weights, bias)
        return grouped_product(x, _of_each(weights, ends), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored, ends = ctx.saved_tensors
        weights = ctx.quantization.decode(stored, gradient.dtype)
        if ends is None:
            # Decoded, not in fp8: that kernel wants the codes in the other memory order, which
            # would double their memory (docs/adr/0030-fp8-by-rows.md).
            of_x = gradient @ weights
        else:
            of_x = grouped_product(gradient, _of_each(weights, ends).transpose(1, 2), ends)
        return of_x, None, None, None, None


def _of_each(weights: Tensor, ends: Tensor) -> Tensor:
    """[experts · out, in] -> [experts, out, in]."""
    return weights.unflatten(0, (len(ends), -1))


def product_in_fp8(
    x: Tensor, stored: Tensor, quantization: Quantization, bias: Tensor | None
) -> Tensor:
    """`W x + b` for a W in fp8: x [..., in] -> [..., out] in the type of x.

    x is rounded to fp8 row by row.
    """
    rows = x.flatten(0, -2)
    scales = _fp8_scales(rows)
    product = torch._scaled_mm(
        (rows / scales).to(FP8),
        quantization.codes(stored).view(FP8).t(),
        scale_a=scales,
        scale_b=quantization.scales(stored).t(),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    product = product.view(*x.shape[:-1], quantization.rows)
    if bias is None:
        return product
    return product + bias
