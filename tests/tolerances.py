"""How far apart two computations of the same numbers may be: `PARITY` in one process, a theoretical
bound across ranks.

In one process both add up nearly the same sums in the same order. Over all kinds of bases logits
near 5 differ from those of transformers by at most 5e-6, and losses, gradients and exports by 2e-6
of the largest. `PARITY` leaves little room beside that, so that a wrong constant is seen: norms
with twice their epsilon move logits by 2.4e-5 or more (tests/model/test_parity.py).

Ranks, and kernels that a compiler makes, add up in another order: a processor, its number of
threads and the ranks decide in which order a sum of n terms is added. Each order is off by about
sqrt(n) roundings of its largest term, and d such sums after each other by sqrt(d) times as much,
since roundings are as often up as down. `ROOM` is for what is not as random: long runs of one
order, a norm of small numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.model.spec import DecoderSpec

PARITY = 1e-5
"""The largest difference in one process: absolute for logits of transformers, else of the largest
number."""
ROOM = 16
_SUMS_OF_LAYER = 9
"""After each other: norm, query, scores, softmax, heads, output; norm, inner width, down."""


def rounding(terms: int, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference, relative to the largest result, of `sums` sums of `terms` terms after
    each other."""
    return ROOM * (sums * terms) ** 0.5 * torch.finfo(dtype).eps / 2


def rounding_of(spec: DecoderSpec, *, backward: bool = False) -> float:
    """That of a model's logits in fp32, or of its gradients."""
    sums = _SUMS_OF_LAYER * spec.num_layers + 2
    terms = max(spec.widths.hidden_size, spec.widths.intermediate_size)
    return rounding(terms, 2 * sums if backward else sums)


def assert_parity(found: Tensor, expected: Tensor, what: str = "logits") -> None:
    """Each element of `found` is that of `expected`, which another library computed in fp32, up to
    `PARITY`."""
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    error = float((found - expected).detach().abs().max())
    assert error <= PARITY, f"{what}: off by {error:.1e}, expected at most {PARITY:.1e}"


def assert_near(
    found: Tensor,
    expected: Tensor,
    bound: float,
    what: str = "result",
    *,
    scale: Tensor | None = None,
) -> None:
    """Each element of `found` is that of `expected`, up to `bound` times the largest of `scale`
    (None: `expected`)."""
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    largest = float((expected if scale is None else scale).detach().abs().max())
    error = float((found - expected).detach().abs().max())
    assert error <= bound * largest, (
        f"{what}: off by {error:.1e}, expected at most {bound:.1e} of {largest:.1e}"
    )
