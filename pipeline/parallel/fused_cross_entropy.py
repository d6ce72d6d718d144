"""The losses of `parallel.cross_entropy` and their gradients, compiled: two passes over the logits.

One operation after another would read and write fp32 logits eight times. Here the first pass
reduces each row to a few statistics, and the second one writes the gradient in the type of the
weights. Logits may come as two products in 16 bits, whose sum is then never written.

Between the passes, where the vocabulary is split, the ranks join their statistics in two
reductions: every function without an underscore is a collective over the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.cross_entropy import IGNORED
from pipeline.parallel.topology import TensorParallel


class LogitParts(NamedTuple):
    """Logits as a sum that is not yet computed.

    Attributes:
        of_x: [n, columns] in fp32 or 16 bits.
        of_x_up: the same in 16 bits, or None: `of_x` is the whole sum.
        softcap: with c, they were capped by c · tanh(z / c); the gradient is that of z.
        factor: of the gradient.
    """

    of_x: Tensor
    of_x_up: Tensor | None = None
    softcap: float | None = None
    factor: float = 1.0


def nll_and_logit_gradient(
    logits: LogitParts,
    targets: Tensor,
    dtype: torch.dtype,
    *,
    first: int,
    vocab_size: int,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each target: [n] in fp32, and its gradient with respect to the
    logits: [n, columns] in `dtype`. Arguments are as in `cross_entropy.nll_and_logit_gradient_`,
    but nothing is overwritten."""
    columns = _columns(logits, first, vocab_size)
    local = targets - first
    ignored = targets == IGNORED
    if tp.size == 1:
        return _compiled(_nll_and_gradient)(logits, local, ignored, columns, dtype)
    own = _compiled(_statistics)(logits, local, columns)
    normaliser, nll = _joined_over_ranks(own, tp)
    gradient = _compiled(_gradient)(logits, local, ignored, normaliser, columns, dtype)
    return nll.masked_fill(ignored, 0), gradient


def kl_and_logit_gradient(
    logits: LogitParts,
    reference: Tensor,
    ignored: Tensor,
    dtype: torch.dtype,
    *,
    first: int,
    vocab_size: int,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor]:
    """KL(reference || model) of each token: [n] in fp32, and its gradient with respect to the
    logits: [n, columns] in `dtype`. Arguments are as in `cross_entropy.kl_and_logit_gradient_`, but
    nothing is overwritten."""
    columns = _columns(logits, first, vocab_size)
    if tp.size == 1:
        return _compiled(_kl_and_gradient)(logits, reference, ignored, columns, dtype)
    own = _compiled(_kl_statistics)(logits, reference, columns)
    normalisers, kl = _kl_joined_over_ranks(own, tp)
    gradient = _compiled(_kl_gradient)(logits, reference, ignored, normalisers, columns, dtype)
    return kl.masked_fill(ignored, 0), gradient


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled. Tensors without values get results of the same sizes, as what is
    compiled makes nothing else."""

    def run(logits: LogitParts, *arguments: Any) -> Any:
        if logits.of_x.is_meta:
            return _RESULTS[function.__name__](logits.of_x, arguments[-1])
        return _compiled_once(function)(logits, *arguments)

    return run


@cache
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    # The first call fixes all sizes; with chunks of another size it compiles once more, for any.
    return torch.compile(function, fullgraph=True)


def _columns(logits: LogitParts, first: int, vocab_size: int) -> int:
    """How many of this rank's columns are no padding."""
    return max(0, min(vocab_size - first, logits.of_x.shape[1]))


# The passes. They are written for a compiler: what is [n, columns] here is never in memory.


def _nll_and_gradient(
    logits: LogitParts,
    local: Tensor,
    ignored: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both passes, where one rank has all columns."""
    largest, exponentials, target = _statistics(logits, local, columns)
    gradient = _gradient(logits, local, ignored, largest + exponentials.log(), columns, dtype)
    nll = exponentials.log() - (target - largest)
    return nll.masked_fill(ignored, 0), gradient


def _statistics(logits: LogitParts, local: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first pass: each row's largest logit, the sum of exp(logit − largest), and the target's
    logit, 0 where another rank has it."""
    z = _sum(logits, columns)
    largest = _finite(z.amax(dim=1))
    exponentials = (z - largest.unsqueeze(1)).exp().sum(dim=1)
    here = (local >= 0) & (local < columns)
    index = local.clamp(0, logits.of_x.shape[1] - 1).unsqueeze(1)
    target = logits.of_x.gather(1, index).float()
    if logits.of_x_up is not None:
        target = target + logits.of_x_up.gather(1, index)
    return largest, exponentials, target.squeeze(1).masked_fill(~here, 0)


def _gradient(
    logits: LogitParts,
    local: Tensor,
    ignored: Tensor,
    normaliser: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """The second pass: softmax − one_hot(target); normaliser: [n], log(sum(exp(logits)))."""
    z = _sum(logits, columns)
    is_target = torch.arange(z.shape[1], device=z.device) == local.unsqueeze(1)
    gradient = (z - normaliser.unsqueeze(1)).exp() - is_target.float()
    gradient = gradient.masked_fill(ignored.unsqueeze(1), 0)
    return (gradient * _slope(z, logits)).to(dtype)


def _kl_and_gradient(
    logits: LogitParts,
    reference: Tensor,
    ignored: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both passes of the divergence, where one rank has all columns."""
    own = _kl_statistics(logits, reference, columns)
    normalisers, kl = _kl_of(own)
    gradient = _kl_gradient(logits, reference, ignored, normalisers, columns, dtype)
    return kl.masked_fill(ignored, 0), gradient


def _kl_statistics(logits: LogitParts, reference: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The first pass of the divergence, with p = exp(reference − its largest), q = exp(logits −
    theirs).

    Returns the largest of both: [2, n], and the sums of p, of q, and of p (reference − logits):
    [3, n].
    """
    z = _sum(logits, columns)
    r = _sum(LogitParts(reference), columns)
    largest_r = _finite(r.amax(dim=1))
    largest_z = _finite(z.amax(dim=1))
    p = (r - largest_r.unsqueeze(1)).exp()
    q = (z - largest_z.unsqueeze(1)).exp()
    # Padding has p = 0, and a difference of two infinities.
    differences = torch.where(_is_column(z, columns), r - z, 0)
    sums = torch.stack([p.sum(dim=1), q.sum(dim=1), (p * differences).sum(dim=1)])
    return torch.stack([largest_r, largest_z]), sums


def _kl_gradient(
    logits: LogitParts,
    reference: Tensor,
    ignored: Tensor,
    normalisers: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """The second pass of the divergence: softmax(logits) − softmax(reference)."""
    z = _sum(logits, columns)
    r = _sum(LogitParts(reference), columns)
    of_reference, of_logits = normalisers
    gradient = (z - of_logits.unsqueeze(1)).exp() - (r - of_reference.unsqueeze(1)).exp()
    gradient = gradient.masked_fill(ignored.unsqueeze(1), 0)
    return (gradient * _slope(z, logits)).to(dtype)


def _kl_of(own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The logarithms of both softmaxes' denominators: [2, n], and the divergence, from the
    statistics of all columns."""
    largest, (p, q, weighted) = own
    # Equal logits give exact zeros: each difference below is one of equal numbers.
    kl = weighted / p + (largest[1] - largest[0]) + (q.log() - p.log())
    return largest + torch.stack([p, q]).log(), kl


def _sum(logits: LogitParts, columns: int) -> Tensor:
    """The logits in fp32, −inf in padding."""
    z = logits.of_x.float()
    if logits.of_x_up is not None:
        z = z + logits.of_x_up
    if columns == z.shape[1]:
        return z
    return torch.where(_is_column(z, columns), z, -torch.inf)


def _is_column(z: Tensor, columns: int) -> Tensor:
    return torch.arange(z.shape[1], device=z.device) < columns


def _finite(largest: Tensor) -> Tensor:
    """The largest logits of rows; of padding alone the least number, from which it subtracts."""
    return largest.clamp(min=torch.finfo(torch.float32).min)


def _slope(z: Tensor, logits: LogitParts) -> Tensor | float:
    """The factor of the gradient of each logit z; 0 for impossible ones that are capped."""
    if logits.softcap is None:
        return logits.factor
    # d(c tanh(z / c)) / dz = 1 - tanh²(z / c)
    return logits.factor * (1 - (z / logits.softcap).square()).clamp(min=0)


# Between the passes, on several ranks.


def _joined_over_ranks(
    own: tuple[Tensor, Tensor, Tensor], tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """log(sum(exp(logits))) and the nll of each row, from the statistics of each rank's columns."""
    own_largest, exponentials, target = own
    largest = own_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    sums = torch.stack([exponentials * (own_largest - largest).exp(), target])
    dist.all_reduce(sums, group=tp.group)
    exponentials, target = sums
    return largest + exponentials.log(), exponentials.log() - (target - largest)


def _kl_joined_over_ranks(own: tuple[Tensor, Tensor], tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """As `_kl_of`, from the statistics of each rank's columns."""
    own_largest, sums = own
    largest = own_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    scale_p, scale_q = (own_largest - largest).exp()
    # The sum of p (reference − logits) has the factor of p.
    sums = sums * torch.stack([scale_p, scale_q, scale_p])
    dist.all_reduce(sums, group=tp.group)
    return _kl_of((largest, sums))


# What tensors without values get, by the name of the pass.


def _empty_rows(z: Tensor, *sizes: int) -> Tensor:
    return z.new_empty(*sizes, len(z), dtype=torch.float32)


def _empty_logits(z: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(z, dtype=dtype)


_RESULTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "_nll_and_gradient": lambda z, dtype: (_empty_rows(z), _empty_logits(z, dtype)),
    "_kl_and_gradient": lambda z, dtype: (_empty_rows(z), _empty_logits(z, dtype)),
    "_statistics": lambda z, _: (_empty_rows(z), _empty_rows(z), _empty_rows(z)),
    "_kl_statistics": lambda z, _: (_empty_rows(z, 2), _empty_rows(z, 3)),
    "_gradient": _empty_logits,
    "_kl_gradient": _empty_logits,
}
