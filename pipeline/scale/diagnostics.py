"""How far a widened model has moved from its base: pure functions of hidden states and logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.parallel.topology import TensorParallel


def mean_cosine(x: Tensor, reference: Tensor, tp: TensorParallel) -> float:
    """The mean over tokens of cos(x, reference). 1 where the base stream is what it was.

    x, reference: [B, S, D], or this rank's positions of them, as they lie between regions.
    """
    mean = F.cosine_similarity(x.float(), reference.float(), dim=-1).mean()
    if tp.sequence_parallel:
        dist.all_reduce(mean, group=tp.group)
        mean /= tp.size
    return float(mean)


def kl_divergence(logits: Tensor, reference: Tensor, tp: TensorParallel) -> float:
    """KL(reference ‖ model) in nats, summed over tokens.

    logits, reference: [N, V / tp_size] in fp32, this rank's columns without padding.
    """
    log_p, log_q = log_probabilities(reference, tp), log_probabilities(logits, tp)
    terms = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if tp.size > 1:
        dist.all_reduce(terms, group=tp.group)
    return float(terms.sum())


def log_probabilities(logits: Tensor, tp: TensorParallel) -> Tensor:
    """log softmax over a vocabulary that is split over the ranks: [N, V / tp_size] -> the same shape."""
    if tp.size == 1:
        return logits.log_softmax(dim=-1)
    largest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    shifted = logits - largest
    normaliser = shifted.exp().sum(dim=-1, keepdim=True)
    dist.all_reduce(normaliser, group=tp.group)
    return shifted - torch.log(normaliser)
