"""One product for the rows of all experts of a mixture, sorted by expert."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED_BYTES = 16
"""What the rows of every matrix in a grouped product, and in its backward pass, must be a multiple
of."""


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x: [N, in] sorted by expert, weights: [experts, out, in], ends: [experts] -> [N, out].

    Rows from the last end on are of no expert: their results are undefined.
    """
    if x.is_meta:
        # The sizes and costs are the same whichever experts are chosen.
        return F.linear(x, weights[0])
    _, rows, columns = weights.shape
    has_aligned_rows = rows * x.element_size() % _ALIGNED_BYTES == 0
    has_aligned_columns = columns * x.element_size() % _ALIGNED_BYTES == 0
    # torch's grouped kernel refuses matrices whose strides are not multiples of 16 bytes (TMA's
    # rule). The backward pass transposes the weights, so both dimensions count.
    if has_aligned_rows and has_aligned_columns and has_grouped_product(x.device.type, x.dtype):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return product_of_each(x, weights, ends)


def product_of_each(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_product`, expert by expert. On a GPU the host waits for the counts."""
    # The counts are needed on the host to split the rows: a wait for the device in every layer,
    # which is why the grouped product is preferred.
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    products: list[Tensor] = []
    of_none = len(x) - sum(counts)
    *of_experts, rest = x.split([*counts, of_none])
    for rows, weight in zip(of_experts, weights, strict=True):
        products.append(F.linear(rows, weight))
    if of_none:
        products.append(rest.new_zeros(of_none, weights.shape[1]))
    return torch.cat(products)


@cache
def has_grouped_product(device: str, dtype: torch.dtype) -> bool:
    """Whether torch has one product for all experts on the device, by trying one."""
    ones = torch.ones(2, 16, 16, dtype=dtype, device=device)
    ends = torch.tensor([9, 16], dtype=torch.int32, device=device)
    try:
        return torch.equal(F.grouped_mm(ones[0], ones, offs=ends), 16 * ones[0])
    except (RuntimeError, ValueError):
        return False
