"""Layers on one rank's shard: linear maps, vocabulary-parallel embedding, LoRA's adapter, and softmax cross-entropy.

Linear maps and embedding do not communicate: `collectives.enter_region` and `leave_region` enclose several of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.collectives import counted_once
from pipeline.parallel.experts import grouped_product
from pipeline.parallel.quantized import frozen_product, quantization_of
from pipeline.parallel.sharding import (
    REPLICATED,
    Partition,
    full_shape_of,
    partition_of,
    sharded_parameter,
    shared_by_neighbours,
    used_between_regions,
)
from pipeline.parallel.topology import TensorParallel


class ColumnParallelLinear(nn.Module):
    """`Y = W X + b`, with the rows of W (and of b) split over the ranks.

    `units` is how many indivisible groups the rows form (heads). x: [..., in], y: [..., out / tp_size].
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        partition = Partition(dim=0, units=units)
        self.weight = sharded_parameter((out_features, in_features), partition, tp)
        self.bias = sharded_parameter((out_features,), partition, tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else shared_by_neighbours(self.bias, self.tp)
        return _product(x, self.weight, bias, self.tp)


class RowParallelLinear(nn.Module):
    """The partial product of `Y = W X`, with the columns of W split over the ranks.

    x: [..., in / tp_size], y: [..., out], a partial sum over the ranks; rank 0's part includes the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, units: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter(
            (out_features, in_features), Partition(dim=1, units=units), tp
        )
        self.bias = sharded_parameter((out_features,), Partition(), tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else counted_once(self.bias, self.tp)
        return _product(x, self.weight, bias, self.tp)


class ReplicatedLinear(nn.Module):
    """`Y = W X` between regions, with all of W on every rank. x: [..., in], y: [..., out]."""

    def __init__(self, in_features: int, out_features: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((out_features, in_features), REPLICATED, tp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, used_between_regions(self.weight, self.tp))


class ExpertLinear(nn.Module):
    """`Y = W_e X` for the rows of each expert e, with W: [experts, out, in].

    Rows and columns of each expert's matrix are split over the ranks as `dim` says: 1 `out`, 2 `in`; with 2 results are
    partial sums. x: [N, in], sorted by expert; ends: int32 [experts], where the rows of each end; y: [N, out].
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, dim: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        shape = (experts, out_features, in_features)
        self.weight = sharded_parameter(shape, Partition(dim=dim, units=shape[dim]), tp)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        quantization = quantization_of(self.weight)
        if quantization is None:
            return grouped_product(x, self.weight, ends)
        return frozen_product(x, self.weight, quantization, ends=ends)


def _product(x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """x: [..., in] -> [..., out]; a frozen `weight` may be quantised."""
    quantization = quantization_of(weight)
    if quantization is not None:
        return frozen_product(x, weight, quantization, bias)
    return F.linear(x, shared_by_neighbours(weight, tp), bias)


VOCABULARY = Partition(dim=0, padded=True)


class VocabularyParallelEmbedding(nn.Module):
    """Looks up tokens in this rank's rows; tokens of other ranks give zeros.

    tokens: [B, S], result: [B, S, D], a partial sum over the ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.first, self.stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first) | (tokens >= self.stop)
        rows = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class LowRankAdapter(nn.Module):
    """s B A x, to be added to W x: x: [..., in] -> [..., out], a partial sum over the ranks if W is row-parallel.

    W: [out, in] is `weight`, s is `scale`, A: [rank, in], B: [out, rank]. If W is split by rows, so is B; if by
    columns, so is A. The other factor is replicated, but each rank applies it to its part only, so its gradient is
    summed over the ranks. A and B are parameters of this module, so that ZeRO-3 gathers both at once.
    """

    def __init__(
        self, weight: nn.Parameter, rank: int, *, scale: float, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.scale = scale
        partition = partition_of(weight)
        out_features, in_features = full_shape_of(weight)
        self.a = sharded_parameter(
            (rank, in_features), partition if partition.dim == 1 else REPLICATED, tp
        )
        self.b = sharded_parameter(
            (out_features, rank), partition if partition.dim == 0 else REPLICATED, tp
        )

    def forward(self, x: Tensor) -> Tensor:
        reduced = F.linear(x, shared_by_neighbours(self.a, self.tp))
        return F.linear(reduced * self.scale, shared_by_neighbours(self.b, self.tp))


IGNORED = -100


def nll_and_logit_gradient_(
    logits: Tensor, targets: Tensor, *, first: int, vocab_size: int, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each target, and its gradient with respect to the logits, written over them.

    logits: [N, V / tp_size] in fp32, the columns from token `first` on (columns past `vocab_size` are padding);
    targets: [N], `IGNORED` where nothing is predicted (nll and gradient are zero there).
    Returns nll: [N] and the gradient of their sum: [N, V / tp_size], which is `logits` itself.
    """
    _mask_padding_(logits, first, vocab_size)
    largest = logits.amax(dim=1)
    if tp.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    logits -= largest.unsqueeze(1)

    local = targets - first
    here = (local >= 0) & (local < logits.shape[1])
    index = local.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    target_logit = logits.gather(1, index).squeeze(1).masked_fill(~here, 0)

    exponentials = logits.exp_()
    sums = torch.stack([exponentials.sum(dim=1), target_logit])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    normaliser, target_logit = sums

    ignored = targets == IGNORED
    nll = (normaliser.log() - target_logit).masked_fill(ignored, 0)
    # Division by infinity zeroes the ignored rows without another pass over the logits.
    gradient = exponentials.div_(normaliser.masked_fill(ignored, torch.inf).unsqueeze(1))
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
    """KL(reference || model) of each token in nats, and its gradient with respect to the model's logits.

    logits, reference: [N, V / tp_size] in fp32 as in `nll_and_logit_gradient_`; both are overwritten. ignored: bool
    [N]; the divergence and the gradient of these tokens are zero.
    Returns kl: [N] and the gradient of its sum: [N, V / tp_size], which is `logits` itself. Equal logits give exact
    zeros.
    """
    columns = max(0, min(vocab_size - first, logits.shape[1]))
    logits[:, columns:] = 0  # padding has no gradient
    whole, logits, reference = logits, logits[:, :columns], reference[:, :columns]
    # A rank may hold padding only.
    largest = torch.stack(
        [
            z.amax(dim=1) if columns else z.new_full((len(z),), -torch.inf)
            for z in (logits, reference)
        ]
    )
    if tp.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    logits -= largest[0].unsqueeze(1)
    reference -= largest[1].unsqueeze(1)

    difference = reference - logits
    p, q = reference.exp_(), logits.exp_()
    sums = torch.stack([p.sum(dim=1), q.sum(dim=1), difference.mul_(p).sum(dim=1)])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    p_sum, q_sum, weighted = sums

    kl = (weighted / p_sum - p_sum.log() + q_sum.log()).masked_fill(ignored, 0)
    q.div_(q_sum.masked_fill(ignored, torch.inf).unsqueeze(1))
    q.sub_(p.div_(p_sum.masked_fill(ignored, torch.inf).unsqueeze(1)))
    return kl, whole


def greedy_choices_(logits: Tensor, *, first: int, vocab_size: int, tp: TensorParallel) -> Tensor:
    """The token that greedy decoding chooses in each row: int64 [N]; the first of several with the largest logit.

    `logits` are as in `nll_and_logit_gradient_`; only their padding is overwritten.
    """
    _mask_padding_(logits, first, vocab_size)
    largest, place = logits.max(dim=1)
    chosen = place + first
    if tp.size > 1:
        own_largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
        chosen.masked_fill_(own_largest < largest, vocab_size)
        dist.all_reduce(chosen, op=dist.ReduceOp.MIN, group=tp.group)
    return chosen


def _mask_padding_(logits: Tensor, first: int, vocab_size: int) -> None:
    if first + logits.shape[1] > vocab_size:
        logits[:, max(0, vocab_size - first) :] = float("-inf")
