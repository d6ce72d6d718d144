"""Softmax cross-entropy over a vocabulary that is split over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel

IGNORED = -100


def nll_and_logit_gradient_(
    logits: Tensor, targets: Tensor, *, first: int, vocab_size: int, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each target, and its gradient with respect to the logits, written over them.

    logits: [N, V / tp_size] in fp32, the columns from token `first` on (columns past `vocab_size` are padding);
    targets: [N], `IGNORED` where nothing is predicted (nll and gradient are zero there).
    Returns nll: [N] and the gradient of their sum: [N, V / tp_size], which is `logits` itself.
    """
    if first + logits.shape[1] > vocab_size:
        logits[:, max(0, vocab_size - first) :] = float("-inf")
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
    gradient = exponentials.div_(normaliser.unsqueeze(1))
    gradient.scatter_add_(1, index, -here.to(gradient.dtype).unsqueeze(1))
    gradient.masked_fill_(ignored.unsqueeze(1), 0)
    return nll, gradient
