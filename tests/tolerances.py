"""How far apart two orders of the same sums may be, from their type, size and depth.

A processor, its number of threads and the ranks decide in which order a sum of n terms is added. Each order is off by
about sqrt(n) roundings of its largest term, and d such sums after each other by sqrt(d) times as much, since roundings
are as often up as down. `ROOM` is for what is not as random: long runs of one order, a norm of small numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from pipeline.model.spec import DecoderSpec

ROOM = 16
_SUMS_OF_LAYER = 9
"""After each other: norm, query, scores, softmax, heads, output; norm, inner width, down."""


def rounding(terms: int, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference, relative to the largest result, of `sums` sums of `terms` terms after each other."""
    return ROOM * (sums * terms) ** 0.5 * torch.finfo(dtype).eps / 2


def rounding_of(model: DecoderSpec | PretrainedConfig, *, backward: bool = False) -> float:
    """That of a model's logits in fp32, or of its gradients."""
    sizes = model.widths if isinstance(model, DecoderSpec) else model
    layers = model.num_layers if isinstance(model, DecoderSpec) else model.num_hidden_layers
    sums = _SUMS_OF_LAYER * layers + 2
    return rounding(max(sizes.hidden_size, sizes.intermediate_size), 2 * sums if backward else sums)


def assert_near(
    found: Tensor, expected: Tensor, bound: float, what: str = "result", *, scale: Tensor | None = None
) -> None:
    """Each element of `found` is that of `expected`, up to `bound` times the largest of `scale` (None: `expected`)."""
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    largest = float((expected if scale is None else scale).detach().abs().max())
    error = float((found - expected).detach().abs().max())
    assert error <= bound * largest, f"{what}: off by {error:.1e}, expected at most {bound:.1e} of {largest:.1e}"
