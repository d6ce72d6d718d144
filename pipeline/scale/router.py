"""The router of SCALE-Route, Eq. 5 of the paper: which tokens keep the preserved path, and what
their logits are.

    Z = (Z_p + Z_a) / 2 + Z_p^up   where cos(Z_p, Z_a) > threshold: the token is preserved
    Z =        Z_a      + Z_a^up   elsewhere

Z_p and Z_a are the base logits W_out x of the preserved and the adapted path, Z^up = W_out^up x_up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import TensorParallel
from pipeline.scale.widened_linear import Streams
from pipeline.scale_math import keeps_preserved_path


@torch.no_grad()
def preserved_tokens(z_p: Tensor, z_a: Tensor, threshold: float, tp: TensorParallel) -> Tensor:
    """The router's choice: a mask [N] of the tokens where cos(Z_p, Z_a) > threshold.

    z_p, z_a: [N, V / tp_size], this rank's columns of the base logits of both paths, in fp32 and
    without padding. The cosine takes three sums a token: one all-reduce over the tensor-parallel
    group, all of whose ranks must call it, where the vocabulary is split.
    """
    # `(z_p * z_a).sum(-1)` would need a temporary as large as the logits.
    # In fp32, as z_p and z_a are: sums over 100,000 columns in 16 bits would decide at random near
    # the threshold.
    product = torch.bmm(z_p.unsqueeze(1), z_a.unsqueeze(2)).flatten()
    square_p = torch.linalg.vector_norm(z_p, dim=-1).square()
    square_a = torch.linalg.vector_norm(z_a, dim=-1).square()
    sums = torch.stack([product, square_p, square_a])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    product, square_p, square_a = sums
    return keeps_preserved_path(product, square_p, square_a, threshold)


def mixed_logits_(z_p: Tensor, z_a: Tensor, preserved: Tensor) -> Tensor:
    """The base logits of each token by Eq. 5, written over z_a. z_p, z_a: [N, columns]; preserved:
    bool [N]."""
    # Weight 0.5 gives (Z_p + Z_a) / 2, and weight 0 exactly Z_a, in one pass without a temporary.
    return z_a.lerp_(z_p, preserved.unsqueeze(1) * 0.5)


def mixed_streams(preserved_path: Streams, adapted_path: Streams, preserved: Tensor) -> Streams:
    """The streams whose logits are those of Eq. 5: x [N, D] and x_up [N, U]. Their products need
    one path only."""
    preserved_x, preserved_x_up = preserved_path
    x, x_up = adapted_path
    assert preserved_x_up is not None and x_up is not None, "Route has an expansion stream"
    column = preserved.unsqueeze(1)
    return (
        torch.where(column, (x + preserved_x) / 2, x),
        torch.where(column, preserved_x_up, x_up),
    )


class GradientsOfPaths(NamedTuple):
    """The gradients of both paths' streams, [N, D] and [N, U]; None where they were not asked
    for."""

    x: Tensor | None
    x_up: Tensor | None
    preserved_x: Tensor | None
    preserved_x_up: Tensor | None


def gradients_of_paths(
    of_x: Tensor | None, of_x_up: Tensor | None, preserved: Tensor
) -> GradientsOfPaths:
    """The backward pass of `mixed_streams`: the gradients of its results, given to the paths that
    they come from."""
    column = preserved.unsqueeze(1)
    x = preserved_x = None
    if of_x is not None:
        # The derivative of (Z_p + Z_a) / 2 with respect to each path. The choice itself has none:
        # it is a threshold (Eq. 5).
        half = of_x / 2
        x = torch.where(column, half, of_x)
        preserved_x = half.masked_fill(~column, 0)
    x_up = preserved_x_up = None
    if of_x_up is not None:
        x_up = of_x_up.masked_fill(column, 0)
        preserved_x_up = of_x_up.masked_fill(~column, 0)
    return GradientsOfPaths(x, x_up, preserved_x, preserved_x_up)
