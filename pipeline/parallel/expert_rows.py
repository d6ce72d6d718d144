"""The rows of a mixture's experts where several ranks share the experts.

A group of `expert_size` ranks, each with tokens of its own, holds each expert once. In a layer
every rank gets the tokens of all, computes its own experts' sums for them, and each token's partial
sums go back to the rank that it came from:

    |                    | forward                | backward               |
    |--------------------|------------------------|------------------------|
    | `gather_tokens`    | all-gather             | all-to-all, then a sum |
    | `sum_at_owners`    | all-to-all, then a sum | all-gather             |

Messages have the same sizes whatever the router chooses. Sending each row to its expert's rank
instead, k rows a token, sends as much where the group has k ranks, and more where it has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.parallel.topology import ExpertParallel
from pipeline.scale_math import rows_by_expert


def gather_tokens(x: Tensor, ranks: ExpertParallel) -> Tensor:
    """The rows of all ranks, in rank order: x [N, ...] -> [expert_size · N, ...].

    N must be the same on all ranks of the group. A collective: all of them call it together.
    """
    gathered: Tensor = _Gathered.apply(x, ranks)
    return gathered


def sum_at_owners(partial: Tensor, ranks: ExpertParallel) -> Tensor:
    """The sums over the ranks of this rank's rows: partial [expert_size · N, D] -> [N, D].

    A collective over the group: all its ranks call it together.
    """
    summed: Tensor = _SummedAtOwners.apply(partial, ranks)
    return summed


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ExpertParallel) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed_at_owners(gradient, ctx.ranks), None


class _SummedAtOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: ExpertParallel) -> Tensor:
        ctx.ranks = ranks
        return _summed_at_owners(partial, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.ranks), None


def _gathered(x: Tensor, ranks: ExpertParallel) -> Tensor:
    gathered = x.new_empty(ranks.size * len(x), *x.shape[1:])
    dist.all_gather_single(gathered, x.contiguous(), group=ranks.group)
    return gathered


def _summed_at_owners(partial: Tensor, ranks: ExpertParallel) -> Tensor:
    # Not a reduce-scatter, in which the order of a sum depends on the place of an element, and in
    # 16 bits each addition rounds. Both send the same bytes. So a token's sum is the same wherever
    # it stands in a batch, as the preservation check needs.
    received = torch.empty_like(partial, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, partial.contiguous(), group=ranks.group)
    first, *others = received.chunk(ranks.size)
    total = first.float()
    for other in others:
        total = total + other
    return total.to(partial.dtype)


@dataclass(frozen=True)
class ExpertRows:
    """Which rows of the gathered tokens are of this rank's experts, and in what order.

    T tokens take k of the experts each; this rank computes R rows. The last of them is of no
    expert: `places` names it for what other ranks compute.

    Attributes:
        order: int64 [R], which of the T · k pairs of a token and an expert each row is; sorted by
            expert, and rows of no expert behind.
        ends: int32 [held experts], where the rows of each expert end.
        tokens: int64 [R], the token of each row.
        places: int64 [T, k], the row of each pair.
    """

    order: Tensor
    ends: Tensor
    tokens: Tensor
    places: Tensor

    @property
    def is_held(self) -> Tensor:
        """Which rows are of an expert: bool [R]."""
        return torch.arange(len(self.order), device=self.order.device) < self.ends[-1]


def rows_of_held_experts(chosen: Tensor, experts: int, ranks: ExpertParallel) -> ExpertRows:
    """The rows of this rank's experts among all tokens of the group.

    Args:
        chosen: int64 [T, k], the experts of each token.
        experts: how many there are, on all ranks together.
        ranks: this rank's place among them.
    """
    held = experts // ranks.size
    local = chosen - ranks.rank * held
    # Those of other ranks count as one more expert, behind all others.
    local = torch.where((local >= 0) & (local < held), local, held)
    order, ends = rows_by_expert(local, held)
    count = _row_count(chosen, ends, held, ranks)
    # The place of each pair in the sorted order; beyond the last end it is another rank's.
    places = order.argsort().view_as(chosen)
    places = torch.where(places < ends[-1], places, count)
    order = F.pad(order[:count], (0, 1))
    return ExpertRows(order, ends, order // chosen.shape[1], places)


def _row_count(chosen: Tensor, ends: Tensor, held: int, ranks: ExpertParallel) -> int:
    """How many rows this rank makes room for: its experts' own, or the most that there can be."""
    tokens, top_k = chosen.shape
    if ranks.padded:
        # A token takes an expert once at most.
        return tokens * min(top_k, held)
    if chosen.is_meta:
        # Sizes and costs are estimated for a router that is in balance.
        return tokens * top_k // ranks.size
    # The host waits for the device, in every layer.
    return int(ends[-1])
