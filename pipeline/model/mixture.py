"""A mixture of experts as the FFN of a layer, with SCALE's dense expansion beside it.

The router reads the base stream alone. So where that is exact, so is the choice of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.dense_expansion import AddedColumnLinear, AddedRowLinear
from pipeline.model.spec import ACTIVATIONS, Activation, DecoderSpec, MixtureSpec
from pipeline.open_tokens import ALL_OPEN, OpenTokens
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.expert_rows import gather_tokens, rows_of_held_experts, sum_at_owners
from pipeline.parallel.layers import ExpertLinear
from pipeline.parallel.parameters import sharded_parameter, sum_gradient_over_replicas
from pipeline.parallel.sharding import REPLICATED
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan, added_widths
from pipeline.scale.widened_linear import Part, Streams, WidenedColumnLinear, WidenedRowLinear
from pipeline.scale_math import choose_experts, rows_by_expert

Load = tuple[Tensor, Tensor]
"""The load of each expert in each sequence: the share of tokens that take it, and its mean score.

Both are [B, E].
"""


class MixtureFeedForward(nn.Module):
    """y = Σ p_e E_e(x) + W12 h and y_up = W21 y + W22 h; see `pipeline.model.dense_expansion`.

    x: [B, S, D], x_up: [B, S, U] -> the same shapes. h is the inner activation of an FFN that every
    token takes, on both streams.
    """

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        assert spec.mixture is not None, "a layer has experts"
        self.tp = tp
        self.activation = ACTIVATIONS[spec.activation]
        hidden_size = spec.widths.hidden_size
        self.base = Mixture(spec.mixture, hidden_size, self.activation, tp=tp)
        self.gate: AddedColumnLinear | None = None
        self.up: AddedColumnLinear | None = None
        self.down: AddedRowLinear | None = None
        added = added_widths(plan)
        if plan is not None and added is not None:
            streams = (hidden_size, added.hidden_size)
            inner = added.intermediate_size
            collaborative = plan.has_expansion_to_base(layer, "ffn")
            self.gate = AddedColumnLinear(streams, inner, tp=tp)
            self.up = AddedColumnLinear(streams, inner, tp=tp)
            self.down = AddedRowLinear(inner, streams, collaborative=collaborative, tp=tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        x, x_up = enter_region(self.tp, x, x_up)
        # Every rank has all experts, and of each its part: tensor parallelism within experts needs
        # no all-to-all.
        y = self.base(x, open_tokens=open_tokens)
        if x_up is None or self.gate is None or self.up is None or self.down is None:
            return leave_region(self.tp, y, None)
        inner = self.activation(self.gate(x, x_up)) * self.up(x, x_up)
        y, y_up = self.down(y, inner, open_tokens=open_tokens)
        y, y_up = leave_region(self.tp, y, y_up)
        # W21 reads the whole y, which no rank has before the sum over the ranks.
        return y, self.down.base_to_expansion(y) + y_up


class Mixture(nn.Module):
    """The base's mixture of experts: the weighted sum over the experts that each token takes.

    x: [B, S, D] -> [B, S, D], a partial sum over the ranks.

    Attributes:
        loads: the list to which the load of a router that trains is added; `recorded_loads` sets
            it.
    """

    loads: list[Load] | None = None

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.router = Router(mixture, hidden_size, tp=tp)
        self.experts = Experts(mixture, hidden_size, activation, tp=tp)
        self.shared: SharedExpert | None = None
        if mixture.shared_size:
            self.shared = SharedExpert(mixture, hidden_size, activation, tp=tp)

    def forward(self, x: Tensor, *, open_tokens: OpenTokens = ALL_OPEN) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen, scores = self.router(rows)
        if self.router.weight.requires_grad and torch.is_grad_enabled():
            # Recomputation in the backward pass must compute the load too, but not count it again.
            load = self._load(scores, chosen, len(x))
            if self.loads is not None:
                self.loads.append(load)
        y: Tensor = self.experts(rows, weights, chosen)
        if self.shared is not None:
            y = y + self.shared(rows, open_tokens=open_tokens.like(rows))
        return y.view_as(x)

    def _load(self, scores: Tensor, chosen: Tensor, sequences: int) -> Load:
        """The load in each sequence; scores: [B·S, E], chosen: [B·S, k]."""
        if self.router.tp.rank > 0:
            # All ranks compute the same scores, and their gradients are added up.
            scores = scores.detach()
        taken = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        taken = taken.unflatten(0, (sequences, -1))
        scores = scores.unflatten(0, (sequences, -1))
        return taken.mean(1), scores.mean(1)


@contextmanager
def recorded_loads(mixtures: Sequence[Mixture]) -> Iterator[list[Load]]:
    """The loads of those `mixtures` whose routers train, in the passes inside."""
    loads: list[Load] = []
    for mixture in mixtures:
        mixture.loads = loads
    try:
        yield loads
    finally:
        for mixture in mixtures:
            mixture.loads = None


def balance_loss(loads: Sequence[Load]) -> Tensor:
    """The load-balancing loss of transformers, of each sequence by itself: [B].

    With equal loads it is k, the experts that a token takes, which is its least value. Taken over a
    batch, as transformers does, it would depend on how sequences are spread over ranks and
    micro-batches.
    """
    taken = torch.stack([taken for taken, _ in loads]).mean(0)
    scores = torch.stack([scores for _, scores in loads]).mean(0)
    # E · Σ f_e P_e (Fedus et al. 2022, Switch Transformers, eq. 4). No gradient flows through the
    # shares f, which are counts.
    return taken.shape[-1] * (taken * scores).sum(-1)


class Router(nn.Module):
    """Chooses the experts of each token.

    x: [N, D] -> the weights of the experts that each token takes and their numbers, both [N, k],
    and all scores [N, E].

    Attributes:
        bias: [3, E], of which the sum of the rows counts. Training casts parameters to 16 bits, and
            three such numbers hold one in fp32 (`pipeline.model.base_folder.three_16_bit_rows`).
    """

    def __init__(self, mixture: MixtureSpec, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.mixture = mixture
        self.weight = sharded_parameter((mixture.experts, hidden_size), REPLICATED, tp)
        self.bias: nn.Parameter | None = None
        if mixture.sigmoid:
            self.bias = sharded_parameter((3, mixture.experts), REPLICATED, tp)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixture = self.mixture
        weight = sum_gradient_over_replicas(self.weight, self.tp)
        weights, chosen, scores = choose_experts(
            x, weight, self.bias, mixture.top_k, mixture.normalised, mixture.scale
        )
        # Rounded as in transformers, which multiplies hidden states by weights of their type.
        return weights.to(x.dtype), chosen, scores


class SharedExpert(nn.Module):
    """The FFN that every token takes beside its experts.

    x: [N, D] -> [N, D], a partial sum over the ranks.
    """

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.activation = activation
        hidden = (Part(hidden_size, 1), None)
        inner = (Part(mixture.shared_size, mixture.shared_size), None)
        self.gate = WidenedColumnLinear(hidden, inner, bias=False, tp=tp)
        self.up = WidenedColumnLinear(hidden, inner, bias=False, tp=tp)
        self.down = WidenedRowLinear(inner, hidden, bias=False, tp=tp)
        self.weight: nn.Parameter | None = None
        if mixture.gated:
            self.weight = sharded_parameter((1, hidden_size), REPLICATED, tp)

    def forward(self, x: Tensor, *, open_tokens: OpenTokens = ALL_OPEN) -> Tensor:
        gate, _ = self.gate(x, None, open_tokens=open_tokens)
        inner, _ = self.up(x, None, open_tokens=open_tokens)
        y: Tensor
        y, _ = self.down(self.activation(gate) * inner, None, open_tokens=open_tokens)
        if self.weight is None:
            return y
        return F.linear(x, sum_gradient_over_replicas(self.weight, self.tp)).sigmoid() * y


class Experts(nn.Module):
    """x: [N, D], with the experts that each token takes and their weights, both [N, k] -> [N, D].

    The rows of tokens are sorted by expert, k rows for each token, and every linear map is one
    product over all. Where several data-parallel ranks share the experts, a rank computes the rows
    of its own experts for the tokens of all of them.
    """

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.expert_parallel = tp.expert_parallel
        self.activation = activation
        self.count = mixture.experts
        inner = mixture.intermediate_size
        self.gate = ExpertLinear(self.count, hidden_size, inner, dim=1, tp=tp)
        self.up = ExpertLinear(self.count, hidden_size, inner, dim=1, tp=tp)
        self.down = ExpertLinear(self.count, inner, hidden_size, dim=2, tp=tp)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        # Every token keeps its k experts: there is no capacity beyond which tokens are dropped,
        # because a base trained without one would give other logits.
        if self.expert_parallel.size > 1:
            return self._over_ranks(x, weights, chosen)
        order, ends = rows_by_expert(chosen, self.count)
        tokens = order // chosen.shape[1]  # the token of each sorted row
        places = order.argsort().view_as(chosen)  # where the k rows of each token stand
        rows = _Moved.apply(x, tokens, places, True, None)
        inner = self.activation(self.gate(rows, ends)) * self.up(rows, ends)
        # The down map is linear: weighting the narrower inner activations costs less than weighting
        # its results.
        weighted = inner * weights.flatten()[order].unsqueeze(-1)
        y: Tensor = _Moved.apply(self.down(weighted, ends), tokens, places, False, None)
        return y

    def _over_ranks(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ranks = self.expert_parallel
        # One message for both, which are of one type.
        of_all = gather_tokens(torch.cat([x, weights], dim=1), ranks)
        x_of_all, weights_of_all = of_all.split([x.shape[1], weights.shape[1]], dim=1)
        chosen_of_all = gather_tokens(chosen.int(), ranks).long()
        held = rows_of_held_experts(chosen_of_all, self.count, ranks)
        # Rows of no expert hold whatever their memory held, which nothing may read.
        last = len(held.order) - 1
        rows = _Moved.apply(x_of_all, held.tokens, held.places, True, last)
        inner = self.activation(self.gate(rows, held.ends)) * self.up(rows, held.ends)
        factors = weights_of_all.flatten()[held.order].where(held.is_held, 0).unsqueeze(-1)
        y = self.down(inner * factors, held.ends)
        partial: Tensor = _Moved.apply(y, held.tokens, held.places, False, last)
        return sum_at_owners(partial, ranks)


class _Moved(torch.autograd.Function):
    """Copies tokens' rows to their experts, or sums the experts' rows of each token.

    With `spread`: x [N, D] -> the rows of `tokens`, [N·k, D]. Without: x [N·k, D] -> the sums of
    the rows at `places` [N, k], [N, D]. Each is the other's gradient; autograd's own, of an
    indexing, may add in an order that chance decides. Indices are saved as tensors, so that
    recomputation replaces them with the rest. No sum reads the row `unread`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, spread: bool, unread: int | None
    ) -> Tensor:
        ctx.save_for_backward(tokens, places)
        ctx.spread = spread
        ctx.unread = unread
        return _moved(x, tokens, places, spread, unread)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, places = ctx.saved_tensors
        moved = _moved(gradient, tokens, places, not ctx.spread, ctx.unread)
        return moved, None, None, None, None


def _moved(x: Tensor, tokens: Tensor, places: Tensor, spread: bool, unread: int | None) -> Tensor:
    if spread:
        return x.index_select(0, tokens)
    return F.embedding_bag(places, x, mode="sum", padding_idx=unread)
