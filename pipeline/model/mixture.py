"""A mixture of experts as the FFN of a layer: the base's router and experts, and SCALE's dense
expansion beside them.

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
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.linear import ExpertLinear
from pipeline.parallel.sharding import REPLICATED, sharded_parameter, shared_by_neighbours
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_linear import Part, Streams, WidenedColumnLinear, WidenedRowLinear
from pipeline.scale_math import choose_experts, rows_by_expert

Load = tuple[Tensor, Tensor]
"""Of each expert in each sequence, [B, E]: the share of tokens that take it, and its mean score."""


class MixtureFeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes: y = Σ p_e E_e(x) + W12 h and y_up = W21 y +
    W22 h.

    h is the inner activation of an FFN that every token takes, on both streams.
    """

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        assert spec.mixture is not None, "a layer has experts"
        self.tp = tp
        self.activation, hidden_size = ACTIVATIONS[spec.activation], spec.widths.hidden_size
        self.base = Mixture(spec.mixture, hidden_size, self.activation, tp=tp)
        self.gate = self.up = self.down = None
        if plan is not None:
            streams, inner = (
                (hidden_size, plan.expansion.hidden_size),
                plan.expansion.intermediate_size,
            )
            self.gate = AddedColumnLinear(streams, inner, tp=tp)
            self.up = AddedColumnLinear(streams, inner, tp=tp)
            self.down = AddedRowLinear(
                inner, streams, collaborative=plan.has_expansion_to_base(layer, "ffn"), tp=tp
            )

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool | Tensor = False) -> Streams:
        x, x_up = enter_region(self.tp, x, x_up)
        y, y_up = self.base(x, masked=masked), None
        if x_up is None or self.gate is None or self.up is None or self.down is None:
            return leave_region(self.tp, y, y_up)
        y, y_up = self.down(
            y, self.activation(self.gate(x, x_up)) * self.up(x, x_up), masked=masked
        )
        y, y_up = leave_region(self.tp, y, y_up)
        return y, self.down.base_to_expansion(y) + y_up


class Mixture(nn.Module):
    """x: [B, S, D] -> the sum over the experts that each token takes, [B, S, D]; a partial sum over
    the ranks.

    `loads`: where the load of a router that trains is added, while `recorded_loads` sets it.
    """

    loads: list[Load] | None = None

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.router = Router(mixture, hidden_size, tp=tp)
        self.experts = Experts(mixture, hidden_size, activation, tp=tp)
        self.shared = (
            SharedExpert(mixture, hidden_size, activation, tp=tp) if mixture.shared_size else None
        )

    def forward(self, x: Tensor, *, masked: bool | Tensor = False) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen, scores = self.router(rows)
        if self.router.weight.requires_grad and torch.is_grad_enabled():
            load = self._load(scores, chosen, len(x))
            if (
                self.loads is not None
            ):  # recomputation must compute the load too, but not count it again
                self.loads.append(load)
        y: Tensor = self.experts(rows, weights, chosen)
        return (y if self.shared is None else y + self.shared(rows, masked=masked)).view_as(x)

    def _load(self, scores: Tensor, chosen: Tensor, sequences: int) -> Load:
        if self.router.tp.rank > 0:
            scores = (
                scores.detach()
            )  # the gradients of the ranks, which compute the same, are added up
        taken = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        return taken.unflatten(0, (sequences, -1)).mean(1), scores.unflatten(
            0, (sequences, -1)
        ).mean(1)


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
    """The load-balancing loss of transformers for each sequence, [B]: with equal loads it is k, its
    least value.

    Taken over a batch, as transformers does, it would depend on how sequences are spread over ranks
    and micro-batches.
    """
    taken, scores = (torch.stack(parts).mean(0) for parts in zip(*loads, strict=True))
    return taken.shape[-1] * (taken * scores).sum(-1)


class Router(nn.Module):
    """x: [N, D] -> the weights of the experts that each token takes, their numbers, both [N, k],
    and all scores [N, E].

    `bias`, [3, E], is the sum of its rows: training casts parameters to 16 bits, and three such
    numbers hold one in fp32 (`pipeline.model.base_folder`).
    """

    def __init__(self, mixture: MixtureSpec, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.mixture = mixture
        self.weight = sharded_parameter((mixture.experts, hidden_size), REPLICATED, tp)
        self.bias = (
            sharded_parameter((3, mixture.experts), REPLICATED, tp) if mixture.sigmoid else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixture, weight = self.mixture, shared_by_neighbours(self.weight, self.tp)
        weights, chosen, scores = choose_experts(
            x, weight, self.bias, mixture.top_k, mixture.normalised, mixture.scale
        )
        return weights.to(x.dtype), chosen, scores


class SharedExpert(nn.Module):
    """The FFN that every token takes beside its experts. x: [N, D] -> [N, D], a partial sum over
    the ranks."""

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.activation = activation
        hidden, inner = (
            (Part(hidden_size, 1), None),
            (Part(mixture.shared_size, mixture.shared_size), None),
        )
        self.gate = WidenedColumnLinear(hidden, inner, bias=False, tp=tp)
        self.up = WidenedColumnLinear(hidden, inner, bias=False, tp=tp)
        self.down = WidenedRowLinear(inner, hidden, bias=False, tp=tp)
        self.weight = sharded_parameter((1, hidden_size), REPLICATED, tp) if mixture.gated else None

    def forward(self, x: Tensor, *, masked: bool | Tensor = False) -> Tensor:
        gate, inner = (linear(x, None, masked=masked)[0] for linear in (self.gate, self.up))
        y: Tensor = self.down(self.activation(gate) * inner, None, masked=masked)[0]
        if self.weight is None:
            return y
        return F.linear(x, shared_by_neighbours(self.weight, self.tp)).sigmoid() * y


class Experts(nn.Module):
    """x: [N, D], with the experts that each token takes and their weights, both [N, k] -> [N, D].

    The rows of tokens are sorted by expert, k rows for each token, and every linear map is one
    product over all.
    """

    def __init__(
        self, mixture: MixtureSpec, hidden_size: int, activation: Activation, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.activation = activation
        self.count, inner = mixture.experts, mixture.intermediate_size
        self.gate = ExpertLinear(self.count, hidden_size, inner, dim=1, tp=tp)
        self.up = ExpertLinear(self.count, hidden_size, inner, dim=1, tp=tp)
        self.down = ExpertLinear(self.count, inner, hidden_size, dim=2, tp=tp)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order, ends = rows_by_expert(chosen, self.count)
        tokens, places = order // chosen.shape[1], order.argsort().view_as(chosen)
        rows = _Moved.apply(x, tokens, places, True)
        inner = self.activation(self.gate(rows, ends)) * self.up(rows, ends)
        # The down map is linear: weighting the narrower inner activations costs less than weighting
        # its results.
        weighted = inner * weights.flatten()[order].unsqueeze(-1)
        y: Tensor = _Moved.apply(self.down(weighted, ends), tokens, places, False)
        return y


class _Moved(torch.autograd.Function):
    """x: [N, D] -> the rows of `tokens` [N·k], if `spread`; otherwise the sums of the rows at
    `places` [N, k].

    Each is the other's gradient; autograd's own, of an indexing, may add in an order that chance
    decides. Indices are saved as tensors, so that recomputation replaces them with the rest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, spread: bool) -> Tensor:
        ctx.save_for_backward(tokens, places)
        ctx.spread = spread
        return _moved(x, tokens, places, spread)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, places = ctx.saved_tensors
        return _moved(gradient, tokens, places, not ctx.spread), None, None, None


def _moved(x: Tensor, tokens: Tensor, places: Tensor, spread: bool) -> Tensor:
    return x.index_select(0, tokens) if spread else F.embedding_bag(places, x, mode="sum")
