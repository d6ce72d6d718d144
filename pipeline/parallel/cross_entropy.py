"""Logits whose vocabulary is split over the ranks: which columns a rank holds, and their
cross-entropy, KL divergence and greedy choices.

Each function of this module is a collective over the tensor-parallel group: all its ranks call it
together. `LogitColumns` communicates nothing.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.sharding import VOCABULARY
from pipeline.parallel.topology import TensorParallel

IGNORED = -100


class ColumnRange(TypedDict):
    """Which of all ranks' columns are a rank's, as the functions below take it."""

    first: int
    vocab_size: int
    tp: TensorParallel


class LogitColumns:
    """Which columns of the logits a rank holds: its part of the base's vocabulary, then its part of
    the new tokens.

    Both parts are padded to the same length on all ranks (`Partition`). With new tokens, the column
    of a token is not its id: the columns of all ranks, one rank after the other, are base, new,
    base, new, ….

    Attributes:
        first: the id of the first token of the base's vocabulary that this rank holds.
        base_width, new_width: the length of each part, padding included.
        base_count, new_count: the length of each part without padding.
    """

    def __init__(self, vocab_size: int, new_tokens: int, tp: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.new_tokens = new_tokens
        self.tp = tp
        self.first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
        self.base_width = stop - self.first
        self.base_count = max(0, min(stop, vocab_size) - self.first)
        first_new, stop_new = VOCABULARY.bounds(new_tokens, tp.rank, tp.size)
        self.new_width = stop_new - first_new
        self.new_count = max(0, min(stop_new, new_tokens) - first_new)

    @property
    def width(self) -> int:
        """The number of columns that each rank holds, padding included."""
        return self.base_width + self.new_width

    @property
    def range(self) -> ColumnRange:
        """This rank's columns among those of all ranks."""
        if not self.new_tokens:
            return {"first": self.first, "vocab_size": self.vocab_size, "tp": self.tp}
        # Padding lies between the columns, where its logits are set to NEVER; so none is cut off at
        # the end.
        first = self.tp.rank * self.width
        return {"first": first, "vocab_size": self.tp.size * self.width, "tp": self.tp}

    def columns_of(self, tokens: Tensor) -> Tensor:
        """The column of each token [N], counted over the columns of all ranks; IGNORED stays."""
        if not self.new_tokens:
            return tokens
        is_new = tokens >= self.vocab_size
        # Arithmetic alone, no table: IGNORED is negative, and takes part without harm until the
        # last line puts it back.
        index = torch.where(is_new, tokens - self.vocab_size, tokens)
        width = torch.where(is_new, self.new_width, self.base_width)
        rank = index // width
        offset = torch.where(is_new, self.base_width, 0)
        columns = rank * self.width + index % width + offset
        return torch.where(tokens == IGNORED, tokens, columns)

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The token of each column [N]; the inverse of `columns_of`."""
        if not self.new_tokens:
            return columns
        rank = columns // self.width
        place = columns % self.width
        base = rank * self.base_width + place
        new = self.vocab_size + rank * self.new_width + place - self.base_width
        return torch.where(place < self.base_width, base, new)


def nll_and_logit_gradient_(
    logits: Tensor, targets: Tensor, *, first: int, vocab_size: int, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each target, and its gradient with respect to the logits,
    written over them.

    logits: [N, V / tp_size] in fp32, the columns from token `first` on (columns past `vocab_size`
    are padding); targets: [N], `IGNORED` where nothing is predicted (nll and gradient are zero
    there). Returns nll: [N] and the gradient of their sum: [N, V / tp_size], which is `logits`
    itself.
    """
    _mask_padding_(logits, first, vocab_size)
    # log-sum-exp relative to the row's largest logit over all ranks, as in Megatron-LM's
    # vocab_parallel_cross_entropy: exp never overflows.
    largest = logits.amax(dim=1)
    if tp.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    logits -= largest.unsqueeze(1)

    # Only the rank that has the target's column contributes its logit; the others add zero.
    local = targets - first
    here = (local >= 0) & (local < logits.shape[1])
    index = local.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    target_logit = logits.gather(1, index).squeeze(1).masked_fill(~here, 0)

    exponentials = logits.exp_()
    # One all-reduce for both sums. It costs 8 bytes a token, where gathered logits would cost 4 V.
    sums = torch.stack([exponentials.sum(dim=1), target_logit])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    normaliser, target_logit = sums

    ignored = targets == IGNORED
    nll = (normaliser.log() - target_logit).masked_fill(ignored, 0)
    # Division by infinity zeroes the ignored rows without another pass over the logits.
    gradient = exponentials.div_(normaliser.masked_fill(ignored, torch.inf).unsqueeze(1))
    # softmax - one_hot(target). Rows whose target is elsewhere, or ignored, subtract zero.
    gradient.scatter_add_(1, index, -here.to(gradient.dtype).unsqueeze(1))
    return nll, gradient


def kl_and_logit_gradient_(
    logits: Tensor,
    reference: Tensor,
    ignored: Tensor,
    *,
    first: int,
    vocab_size: int,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor]:
    """KL(reference || model) of each token in nats, and its gradient with respect to the model's
    logits.

    logits, reference: [N, V / tp_size] in fp32 as in `nll_and_logit_gradient_`; both are
    overwritten. ignored: bool
    [N]; the divergence and the gradient of these tokens are zero.
    Returns kl: [N] and the gradient of its sum: [N, V / tp_size], which is `logits` itself. Equal
    logits give exact zeros.
    """
    columns = max(0, min(vocab_size - first, logits.shape[1]))
    logits[:, columns:] = 0  # padding has no gradient
    gradient = logits
    logits = logits[:, :columns]
    reference = reference[:, :columns]
    # Padding is cut off here instead of being set to -inf, because in the weighted sum below it
    # would give 0 · (inf - inf), which is NaN.
    largest = torch.stack([_largest(logits), _largest(reference)])
    if tp.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    logits -= largest[0].unsqueeze(1)
    reference -= largest[1].unsqueeze(1)

    # With p = exp(reference) and q = exp(logits), both unnormalised:
    # KL = sum(p (reference - logits)) / sum(p) - log sum(p) + log sum(q)
    difference = reference - logits
    p = reference.exp_()
    q = logits.exp_()
    sums = torch.stack([p.sum(dim=1), q.sum(dim=1), difference.mul_(p).sum(dim=1)])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    p_sum, q_sum, weighted = sums
    kl = (weighted / p_sum - p_sum.log() + q_sum.log()).masked_fill(ignored, 0)

    # The gradient is q / sum(q) - p / sum(p), written over the logits. Division by infinity zeroes
    # the ignored rows without another pass over them.
    q.div_(q_sum.masked_fill(ignored, torch.inf).unsqueeze(1))
    q.sub_(p.div_(p_sum.masked_fill(ignored, torch.inf).unsqueeze(1)))
    return kl, gradient


def _largest(z: Tensor) -> Tensor:
    """The largest of each row: z [N, columns] -> [N]; −inf on a rank that holds padding only."""
    if z.shape[1] == 0:
        return z.new_full((len(z),), -torch.inf)
    return z.amax(dim=1)


def greedy_choices_(logits: Tensor, *, first: int, vocab_size: int, tp: TensorParallel) -> Tensor:
    """The token that greedy decoding chooses in each row: int64 [N]; the first of several with the
    largest logit.

    `logits` are as in `nll_and_logit_gradient_`; only their padding is overwritten.
    """
    _mask_padding_(logits, first, vocab_size)
    largest, place = logits.max(dim=1)
    chosen = place + first
    if tp.size > 1:
        own_largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
        # Ranks without the largest logit offer a token past the last one, so that the minimum is
        # the first of the tokens that tie, as argmax gives it on one rank.
        chosen.masked_fill_(own_largest < largest, vocab_size)
        dist.all_reduce(chosen, op=dist.ReduceOp.MIN, group=tp.group)
    return chosen


def _mask_padding_(logits: Tensor, first: int, vocab_size: int) -> None:
    if first + logits.shape[1] > vocab_size:
        logits[:, max(0, vocab_size - first) :] = float("-inf")
