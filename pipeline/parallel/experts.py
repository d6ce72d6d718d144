"""A linear map of every expert of a mixture, on one rank's shard: one product for all tokens, sorted by expert."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.quantized import Quantization, quantization_of
from pipeline.parallel.sharding import Partition, sharded_parameter
from pipeline.parallel.topology import TensorParallel

# Since torch 2.10 by the first name; before, by the second.
_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED_BYTES = 16
"""What the rows of every matrix in a grouped product, and in its backward pass, must be a multiple of."""


class ExpertLinear(nn.Module):
    """`Y = W_e X` for the rows of each expert e, with W: [experts, out, in].

    Rows and columns of each expert's matrix are split over the ranks as `dim` says: 1 `out`, 2 `in`; with 2 results are
    partial sums. x: [N, in], sorted by expert; ends: int32 [experts], where the rows of each end; y: [N, out].
    """

    def __init__(self, experts: int, in_features: int, out_features: int, *, dim: int, tp: TensorParallel) -> None:
        super().__init__()
        shape = (experts, out_features, in_features)
        self.weight = sharded_parameter(shape, Partition(dim=dim, units=shape[dim]), tp)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        quantization = quantization_of(self.weight)
        if quantization is None:
            return grouped_product(x, self.weight, ends)
        product: Tensor = _FrozenProduct.apply(x, self.weight, ends, quantization)
        return product


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x: [N, in] sorted by expert, weights: [experts, out, in], ends: [experts] -> [N, out]."""
    if x.is_meta:  # the sizes and costs are the same whichever experts are chosen
        return F.linear(x, weights[0])
    aligned = all(size * x.element_size() % _ALIGNED_BYTES == 0 for size in weights.shape[1:])
    if aligned and has_grouped_product(x.device.type, x.dtype):
        grouped: Tensor = _grouped_mm(x, weights.transpose(1, 2), offs=ends)  # type: ignore[misc]
        return grouped
    return product_of_each(x, weights, ends)


def product_of_each(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_product`, expert by expert."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, weight) for rows, weight in zip(x.split(counts), weights, strict=True)])


@cache
def has_grouped_product(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has one product for all experts on the device, by trying one."""
    ones = torch.ones(2, 16, 16, dtype=dtype, device=device)
    ends = torch.tensor([9, 16], dtype=torch.int32, device=device)
    try:
        return torch.equal(_grouped_mm(ones[0], ones, offs=ends), 16 * ones[0])  # type: ignore[misc]
    except (RuntimeError, TypeError, ValueError):  # what torch raises depends on its version
        return False


class _FrozenProduct(torch.autograd.Function):
    """The product with a quantised weight, which the backward pass decodes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, ends: Tensor, quantization: Quantization) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(stored, ends)
        ctx.quantization = quantization
        return grouped_product(x, _decoded(stored, quantization, ends, x.dtype), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        stored, ends = ctx.saved_tensors
        weights = _decoded(stored, ctx.quantization, ends, gradient.dtype)
        return grouped_product(gradient, weights.transpose(1, 2), ends), None, None, None


def _decoded(stored: Tensor, quantization: Quantization, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of all experts: [experts, out, in]."""
    return quantization.decode(stored, dtype).unflatten(0, (len(ends), -1))
