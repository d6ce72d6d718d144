"""The router of SCALE-Route, Eq. 5 of the paper: which tokens keep the preserved path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel
from pipeline.scale_math import keeps_preserved_path


@torch.no_grad()
def preserved_tokens(z_p: Tensor, z_a: Tensor, threshold: float, tp: TensorParallel) -> Tensor:
    """The router of SCALE-Route (Eq. 5): a mask [N] of the tokens where cos(Z_p, Z_a) > threshold.

    z_p, z_a: [N, V / tp_size], this rank's columns of the base logits of the preserved and the adapted path, in fp32
    and without padding. The cosine takes three sums a token: one all-reduce where the vocabulary is split.
    """
    # `(z_p * z_a).sum(-1)` would need a temporary as large as the logits.
    product = torch.bmm(z_p.unsqueeze(1), z_a.unsqueeze(2)).flatten()
    squares = (torch.linalg.vector_norm(z, dim=-1).square() for z in (z_p, z_a))
    sums = torch.stack([product, *squares])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    product, square_p, square_a = sums
    return keeps_preserved_path(product, square_p, square_a, threshold)
