"""A frozen matrix stored in 8 or 4 bits, and its product with activations.

The stored form is one tensor of bytes: the codes of the elements, row after row, then their scales
in fp32. Bytes survive what DeepSpeed and `Module.to` do to weights of a floating-point type: they
would cast the scales to 16 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.base import Fp8Scaling, GradientPrecision
from pipeline.errors import ConfigError
from pipeline.parallel.experts import grouped_product
from pipeline.parallel.parameters import full_shape_of, partition_of, quantization_of
from pipeline.parallel.sharding import Partition, Rows, local_shape
from pipeline.parallel.topology import TensorParallel

QuantizedPrecision = Literal["fp8", "nf4"]
FP8 = torch.float8_e4m3fn
_GRADIENT_TYPES: dict[GradientPrecision, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
"""The types in which gradients are rounded to fp8."""
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
_SMALL = 1024
_SMALL_BESIDE = 4096
"""A matrix is small if its shorter side is at most the first, and its longer at most the second.
On an H100 casts cost such products more than fp8 saves: the bounds of torchao's
`auto_filter_small_kn` for one scale a tensor, here for either side, as gradients take W transposed.
"""
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


@dataclass(frozen=True)
class Fp8Recipe:
    """How a base in fp8 is stored and multiplied.

    Attributes:
        scaling: what shares a scale in a matrix.
        gradient: how the input's gradient is computed.
        skip_small: whether small matrices are multiplied in bf16.
    """

    scaling: Fp8Scaling = "tensor"
    gradient: GradientPrecision = "e5m2"
    skip_small: bool = True


DEFAULT_RECIPE = Fp8Recipe()


@dataclass(frozen=True)
class Quantization:
    """How a matrix [rows, columns] is stored, and multiplied.

    fp8: e4m3, with one scale, a power of two, or a scale for each row. nf4: 4 bits with a scale for
    each block of 64 columns, packed and decoded as by bitsandbytes; after the scales comes the
    table of the two values of each byte, because a table made on the host would be a copy to the
    device in every product.

    Attributes:
        precision: the form.
        rows: of the matrix.
        columns: of the matrix.
        scaling: in fp8, what shares a scale.
        gradient: in fp8, how the input's gradient is computed.
        fp8_devices: the types of devices that multiply in fp8: a field, because a layer that is
            compiled cannot ask for a GPU's generation.
    """

    precision: QuantizedPrecision
    rows: int
    columns: int
    scaling: Fp8Scaling = "tensor"
    gradient: GradientPrecision = "e5m2"
    fp8_devices: tuple[str, ...] = ()

    @property
    def _scale_shape(self) -> tuple[int, int]:
        """The shape of the scales."""
        if self.precision == "nf4":
            return self.rows, -(-self.columns // BLOCK)  # rounded up
        if self.scaling == "tensor":
            return 1, 1
        return self.rows, 1

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's codes; in nf4 the last block is padded with zeros."""
        if self.precision == "fp8":
            return self.columns
        _, blocks = self._scale_shape
        return blocks * BLOCK // 2

    @property
    def _scales_at(self) -> int:
        return -(-self.rows * self.row_bytes // _ALIGNED) * _ALIGNED

    @property
    def _table_at(self) -> int:
        return self._scales_at + prod(self._scale_shape) * 4

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
        """A view of `stored`: fp32; [1, 1] or [rows, 1] in fp8, [rows, blocks] in nf4."""
        stored_scales = stored[self._scales_at : self._table_at]
        return stored_scales.view(torch.float32).view(self._scale_shape)

    def _table(self, stored: Tensor) -> Tensor:
        """A view of `stored`: fp32 [256, 2], the two values of each byte."""
        return stored[self._table_at :].view(torch.float32).view(256, 2)

    def write(self, stored: Tensor, matrix: Tensor, above: int = 0, left: int = 0) -> None:
        """Encodes `matrix` [..., ...] and stores its codes from row `above` and byte `left` on.

        It has all elements on which a scale depends, of which this shard may hold a part: whole
        rows, or with one scale the whole matrix.
        """
        codes = self.codes(stored)
        scales = self.scales(stored)
        if self.precision == "fp8" and self.scaling == "tensor":
            scales.copy_(_power_of_two_scale(_largest(matrix), FP8))
        # In parts: a whole matrix in fp32 beside its codes would need five times the memory of the
        # stored form in fp8.
        rows_at_once = max(1, _ENCODED // self.columns)
        for first in range(0, self.rows, rows_at_once):
            rows = slice(first, min(first + rows_at_once, self.rows))
            part = matrix[above + rows.start : above + rows.stop].float()
            if self.precision == "nf4":
                own_codes, scales[rows] = _encode_nf4(part)
            elif self.scaling == "row":
                row_scales = _row_scales(part)
                scales[rows] = row_scales
                own_codes = _encode_fp8(part, row_scales)
            else:
                own_codes = _encode_fp8(part, scales.to(part.device))
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
        values = F.embedding(codes.int(), self._table(stored)).view(*scales.shape, BLOCK)
        return (values * scales.unsqueeze(-1)).to(dtype).flatten(1)[:, : self.columns]


def _encode_fp8(matrix: Tensor, scales: Tensor) -> Tensor:
    """The codes of `matrix` in fp32: uint8 [rows, columns]."""
    # The cast rounds to the nearest; it needs no clamp, since the largest element of those that
    # share a scale becomes at most the largest number of e4m3, 448.
    return (matrix / scales).to(FP8).view(torch.uint8)


def _encode_nf4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes whole rows [rows, columns] in fp32.

    Returns their codes, uint8 [rows, row_bytes], and scales, fp32 [rows, blocks].
    """
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


def _row_scales(matrix: Tensor) -> Tensor:
    """The scale of each row [rows, columns]: fp32 [rows, 1].

    It makes the row's largest element the largest number in fp8.
    """
    return matrix.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FP8).max


def _largest(matrix: Tensor) -> Tensor:
    """The largest absolute value of `matrix`, without a copy of it."""
    return torch.maximum(matrix.amax(), -matrix.amin())


def _power_of_two_scale(largest: Tensor, fp8_type: torch.dtype) -> Tensor:
    """The smallest power of two, fp32, by which values up to `largest` are divided to fit into
    `fp8_type`.

    By such a scale nothing is rounded, neither where values are divided by it nor where a product
    in 16 bits is multiplied. An element's rounding does not depend on it either, unless it lies
    below the normal numbers of `fp8_type` (e4m3: 2^-15 of the largest).
    """
    exact = largest.float().clamp(min=1e-12) / torch.finfo(fp8_type).max
    # Rounded up in the bits of an fp32: a logarithm would depend on the device.
    bits = exact.view(torch.int32) + _MANTISSA_BITS
    return (bits & _EXPONENT_BITS).view(torch.float32)


def rounded(
    matrix: Tensor, precision: QuantizedPrecision, scaling: Fp8Scaling = "tensor"
) -> Tensor:
    """`matrix` [..., columns] stored in `precision` and decoded: what a model computes with, in
    fp32."""
    flat = matrix.flatten(0, -2)
    rows, columns = flat.shape
    quantization = Quantization(precision, rows, columns, scaling)
    stored = torch.empty(quantization.size, dtype=torch.uint8)
    quantization.write(stored, flat)
    return quantization.decode(stored, torch.float32).view(matrix.shape)


def stored_parameter(
    parameter: nn.Parameter,
    precision: QuantizedPrecision,
    name: str,
    tp_size: int,
    recipe: Fp8Recipe = DEFAULT_RECIPE,
) -> nn.Parameter:
    """The stored form, unset, of this rank's shard of the frozen matrix `parameter`.

    The matrices of all experts [experts, out, in] are stored as one, with experts · out rows.

    Args:
        parameter: the matrix, or all experts' matrices.
        precision: the form.
        name: what messages call it.
        tp_size: the number of tensor-parallel ranks.
        recipe: how matrices in fp8 are stored and multiplied.

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
    is_of_experts = len(shape) == 3
    scaling = recipe.scaling
    if is_of_experts:
        # They differ, and are decoded: torch's grouped product in fp8 takes no scale a tensor.
        scaling = "row"
    fp8_devices: tuple[str, ...] = ()
    if precision == "fp8" and not is_of_experts:
        is_skipped = recipe.skip_small and _is_small(shape)
        if not is_skipped and rows % _ALIGNED == 0 and columns % _ALIGNED == 0:
            fp8_devices = _fp8_devices()
    quantization = Quantization(precision, rows, columns, scaling, recipe.gradient, fp8_devices)
    stored: Any = nn.Parameter(
        torch.empty(quantization.size, dtype=torch.uint8, device=parameter.device),
        requires_grad=False,
    )
    stored.quantization = quantization
    stored.tp_partition = partition
    stored.full_shape = shape
    stored.tensor_model_parallel = parameter.tensor_model_parallel  # type: ignore[attr-defined]
    return stored


def _is_small(shape: Sequence[int]) -> bool:
    """Whether a matrix of `shape` is small, whole: what a run computes in fp8 must not depend on
    its tensor-parallel size."""
    return min(shape) <= _SMALL and max(shape) <= _SMALL_BESIDE


def _fp8_devices() -> tuple[str, ...]:
    """The types of devices that compute in fp8, with bf16 activations.

    A CPU computes what GPUs compute, for tests and for runs that try a configuration. The meta
    device stands for this machine's GPU, or for a Hopper where there is none.
    """
    if gpu_computes_in_fp8():
        return "cpu", "meta", "cuda"
    if torch.cuda.is_available():
        return ("cpu",)
    return "cpu", "meta"


def gpu_computes_in_fp8() -> bool:
    """Whether this rank's GPU computes products in fp8.

    Hopper does, later ones if this torch has kernels for them.
    """
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return is_hopper and computes_in_fp8("cuda")


@cache
def computes_in_fp8(device: str) -> bool:
    """Whether torch has all products in fp8 for the device, by trying them.

    With one scale and with a scale for each row; forward, and with gradients in each type.
    """
    ones = torch.ones(_ALIGNED, _ALIGNED, dtype=torch.bfloat16, device=device)
    expected = _ALIGNED * ones
    for scaling, gradient in itertools.product(get_args(Fp8Scaling), _GRADIENT_TYPES):
        quantization = Quantization("fp8", _ALIGNED, _ALIGNED, scaling, gradient)
        stored = torch.empty(quantization.size, dtype=torch.uint8, device=device)
        quantization.write(stored, ones)
        try:
            forward = product_in_fp8(ones, stored, quantization, None)
            backward = input_gradient_in_fp8(ones, stored, quantization)
        except (RuntimeError, ValueError):  # what torch raises depends on its version
            return False
        for product in (forward, backward):
            # Gradients that scales of rows have multiplied are rounded to e5m2's two bits.
            if not torch.allclose(product, expected, rtol=2**-3):
                return False
    return True


def read_partition(parameter: Tensor) -> Partition:
    """How the matrix is split that a rank reads to quantise its shard of `parameter`.

    A scale of fp8 depends on the whole matrix, or row. So where these are cut, every rank reads
    all of them, and what is stored of an element is the same however a matrix is split.
    """
    quantization = quantization_of(parameter)
    assert quantization is not None
    partition = partition_of(parameter)
    if quantization.precision != "fp8":
        return partition
    splits_columns = partition.dim == len(full_shape_of(parameter)) - 1
    if splits_columns or quantization.scaling == "tensor":
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
    partition = partition_of(parameter)
    rows, *_ = local_shape(shape, read_partition(parameter), tp.size)
    matrix = read((0, rows)).flatten(0, -2)
    above = 0
    left = 0
    # More was read than this rank keeps, because scales depend on it.
    if matrix.shape[0] != quantization.rows:
        above, _ = partition.bounds(shape[0], tp.rank, tp.size)
    if matrix.shape[1] != quantization.columns:
        left, _ = partition.bounds(shape[-1], tp.rank, tp.size)
    quantization.write(parameter, matrix, above, left)


def frozen_product(
    x: Tensor,
    stored: Tensor,
    quantization: Quantization,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """`W x + b` with a stored W: [out, in] and a frozen b: [out]. x: [..., in] -> [..., out].

    With `ends` W holds the maps of all experts, as in `grouped_product`. A product with fp8 is
    computed in fp8 where x is in bf16, on `fp8_devices`; elsewhere W is decoded. So is it for the
    input's gradient. Only W's bytes are held between the two passes.
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
        if _is_in_fp8(x, quantization):
            return product_in_fp8(x, stored, quantization, bias)
        weights = quantization.decode(stored, x.dtype)
        if ends is None:
            return F.linear(x, weights, bias)
        return grouped_product(x, _by_expert(weights, ends), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored, ends = ctx.saved_tensors
        quantization: Quantization = ctx.quantization
        if _is_in_fp8(gradient, quantization) and quantization.gradient != "bf16":
            of_x = input_gradient_in_fp8(gradient, stored, quantization)
            return of_x, None, None, None, None
        weights = quantization.decode(stored, gradient.dtype)
        if ends is None:
            of_x = gradient @ weights
        else:
            of_x = grouped_product(gradient, _by_expert(weights, ends).transpose(1, 2), ends)
        return of_x, None, None, None, None


def _by_expert(weights: Tensor, ends: Tensor) -> Tensor:
    """[experts · out, in] -> [experts, out, in]."""
    return weights.unflatten(0, (len(ends), -1))


def _is_in_fp8(x: Tensor, quantization: Quantization) -> bool:
    """Whether a product with activations, or gradients, `x` is computed in fp8."""
    return x.dtype == torch.bfloat16 and x.device.type in quantization.fp8_devices


def product_in_fp8(
    x: Tensor, stored: Tensor, quantization: Quantization, bias: Tensor | None
) -> Tensor:
    """`W x + b` for a W in fp8: x [..., in] -> [..., out] in the type of x.

    x is rounded to fp8 row by row. A token's result depends on no other token: what a gate leaves
    closed keeps the base's numbers beside texts that it opens (docs/adr/0047).
    """
    rows = x.flatten(0, -2)
    weights = quantization.codes(stored).view(FP8).t()
    if quantization.scaling == "row":
        row_scales = _row_scales(rows)
        product = torch._scaled_mm(
            (rows / row_scales).to(FP8),
            weights,
            scale_a=row_scales,
            scale_b=quantization.scales(stored).t(),
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    else:
        scale = quantization.scales(stored)
        product = product_by_token(rows, FP8, weights, scale, use_fast_accum=True)
    product = product.view(*x.shape[:-1], quantization.rows)
    if bias is None:
        return product
    return product + bias


def input_gradient_in_fp8(gradient: Tensor, stored: Tensor, quantization: Quantization) -> Tensor:
    """`G W` for a W in fp8: G [..., out] -> [..., in] in the type of G, which is rounded to fp8 row
    by row."""
    rows = gradient.flatten(0, -2)
    scale = quantization.scales(stored)
    if quantization.scaling == "row":
        # The product sums over W's rows: their scales belong to the columns of G.
        rows = rows * scale.t()
        scale = torch.ones_like(scale[:1])
    # The product takes the columns of its second operand one after another: a copy of the codes for
    # as long as it runs. One that stayed would take as much memory again as the codes.
    weights = quantization.codes(stored).view(FP8).t().contiguous().t()
    gradient_type = _GRADIENT_TYPES[quantization.gradient]
    # Without fast accumulation, as gradients are computed by torchao and Transformer Engine.
    product = product_by_token(rows, gradient_type, weights, scale, use_fast_accum=False)
    return product.view(*gradient.shape[:-1], quantization.columns)


def product_by_token(
    rows: Tensor, fp8_type: torch.dtype, weights: Tensor, scale: Tensor, *, use_fast_accum: bool
) -> Tensor:
    """`rows` [N, k], rounded to `fp8_type`, times the codes `weights` [k, n] of one scale [1, 1].

    Each row has a scale of its own, a power of two. The kernel takes one for all rows and is the
    faster for it; rows are multiplied by their own behind it, which rounds nothing. That way
    (Lingua's) a compiler joins it to what comes next, and to the cast here, which reads rows once,
    where a scale over all of them would need two passes.
    """
    largest = rows.abs().amax(1, keepdim=True)
    row_scales = _power_of_two_scale(largest, fp8_type)
    product = torch._scaled_mm(
        (rows / row_scales.to(rows.dtype)).to(fp8_type),
        weights,
        scale_a=torch.ones_like(scale),
        scale_b=scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    return product * row_scales.to(torch.bfloat16)
