"""The router of SCALE-Route (paper, Eq. 5): per token, the preserved path or the adapted one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel


@torch.no_grad()
def preserved_tokens(z_p: Tensor, z_a: Tensor, threshold: float, tp: TensorParallel) -> Tensor:
    """Which tokens take the preserved path: those where cos(Z_p, Z_a) > threshold.

    z_p, z_a: [N, V / tp_size], this rank's columns of the two paths' base logits, in fp32 and without padding.
    Three sums a token make the cosine, so a split vocabulary costs one all-reduce of three numbers. Returns a mask [N].
    """
    # A product of rows with columns, and not `(z_p * z_a).sum(-1)`: no temporary as large as the logits.
    product = torch.bmm(z_p.unsqueeze(1), z_a.unsqueeze(2)).flatten()
    squares = (torch.linalg.vector_norm(z, dim=-1).square() for z in (z_p, z_a))
    sums = torch.stack([product, *squares])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    product, norm_p, norm_a = sums
    return product > threshold * (norm_p * norm_a).sqrt()
