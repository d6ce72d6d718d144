"""A decoder layer on two streams: norms, causal self-attention, feed-forward.

SCALE adds attention heads and inner width and keeps them separate from the base's: base and added
heads attend in two calls. So the base's call is the same as in the base model, and has no backward
pass where the base stream depends on no trained parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from pipeline.model.attention import Attend
from pipeline.model.mixture import MixtureFeedForward
from pipeline.model.rotary import RotaryTable
from pipeline.model.spec import ACTIVATIONS, DecoderSpec
from pipeline.open_tokens import ALL_OPEN, OpenTokens
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.layers import Gain
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan, added_widths
from pipeline.scale.widened_linear import (
    Part,
    Parts,
    Streams,
    WidenedColumnLinear,
    WidenedRowLinear,
)
from pipeline.scale.widened_norm import WidenedHeadNorm, WidenedNorm


@dataclass(frozen=True)
class Context:
    """What the layers of one kind share in a pass.

    Attributes:
        rotary: the rotary table; None in layers without position embedding.
        attend: the attention kernel for the batch.
    """

    rotary: RotaryTable | None
    attend: Attend


class DecoderLayer(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes.

    With sequence parallelism the shapes are [B, S / tp_size, ...].

    Attributes:
        collaborative: at or above `l_fp`, where the base stream may depend on trained parameters.
        added: a layer that the base does not have.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        plan: ExpansionPlan | None,
        layer: int,
        *,
        added: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.collaborative = plan is None or layer >= plan.collaborative_from
        self.added = added
        self.kind = spec.layers[layer]
        self.parallel_residual = spec.parallel_residual
        has_norms_before = spec.norm_placement != "after"
        has_norms_after = spec.norm_placement != "before"
        feed_forward = MixtureFeedForward if self.kind.has_experts else FeedForward

        self.attention_norm: WidenedNorm | None = None
        self.attention_post_norm: WidenedNorm | None = None
        self.ffn_norm: WidenedNorm | None = None
        self.ffn_post_norm: WidenedNorm | None = None
        # Modules in the order of the computation: parameters are stored and gathered in this order.
        if has_norms_before:
            self.attention_norm = widened_norm(spec, plan, tp)
        self.attention = Attention(spec, plan, layer, tp=tp)
        if has_norms_after:
            self.attention_post_norm = widened_norm(spec, plan, tp)
        if has_norms_before:
            self.ffn_norm = widened_norm(spec, plan, tp)
        self.ffn = feed_forward(spec, plan, layer, tp=tp)
        if has_norms_after:
            self.ffn_post_norm = widened_norm(spec, plan, tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        """Open tokens alone read what was added to x: W12, adapters, and an added layer."""
        if open_tokens.none and self.added:
            return x, x_up
        streams = (x, x_up)
        normed = apply_norm(self.attention_norm, streams, open_tokens)
        attended = self.attention(*normed, context, open_tokens=open_tokens)
        change = apply_norm(self.attention_post_norm, attended, open_tokens)
        # x and x_up are never added to each other here: what the expansion does to the base goes
        # through W12 alone.
        if not self.parallel_residual:
            streams = _add(streams, change)
        fed = self.ffn(*apply_norm(self.ffn_norm, streams, open_tokens), open_tokens=open_tokens)
        fed = apply_norm(self.ffn_post_norm, fed, open_tokens)
        if self.parallel_residual:
            # With parallel residuals (GPT-NeoX) the FFN reads what attention read, and transformers
            # adds the two changes first: another order rounds otherwise.
            fed = _add(fed, change)
        return _add(streams, fed)


class Attention(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = spec.head_dim
        hidden = residual_parts(spec, plan)
        heads: Parts = (self._heads(spec.widths.num_attention_heads), None)
        kv_heads: Parts = (self._heads(spec.widths.num_key_value_heads), None)
        collaborative = False
        self.share_of_expansion_heads = 1.0
        added = added_widths(plan)
        if plan is not None and added is not None:
            heads = (heads[0], self._heads(added.num_attention_heads))
            kv_heads = (kv_heads[0], self._heads(added.num_key_value_heads))
            collaborative = plan.has_expansion_to_base(layer, "attention")
            # Each rank that holds a replicated head adds it to the sum of the output map.
            replicas = Partition(dim=0, units=added.num_attention_heads).replicas(tp.size)
            # Replicas are a power of two in practice, so that the division and the sum over ranks
            # are exact. Only added heads are scaled: the base's query heads always divide by
            # tp_size.
            self.share_of_expansion_heads = 1.0 / replicas

        column = partial(
            WidenedColumnLinear, bias=spec.query_key_value_bias, collaborative=collaborative, tp=tp
        )
        self.query = column(hidden, heads)
        self.key = column(hidden, kv_heads)
        self.value = column(hidden, kv_heads)
        self.query_norm = head_norm(spec, plan, heads, tp)
        self.key_norm = head_norm(spec, plan, kv_heads, tp)
        self.output = WidenedRowLinear(
            heads, hidden, bias=spec.output_bias, collaborative=collaborative, tp=tp
        )

    def _heads(self, count: int) -> Part:
        return Part(count * self.head_dim, count)

    def forward(
        self,
        x: Tensor,
        x_up: Tensor | None,
        context: Context,
        *,
        open_tokens: OpenTokens = ALL_OPEN,
    ) -> Streams:
        # One collective for both streams before the region, and one after it, as in Megatron-LM's
        # layer without an expansion.
        x, x_up = enter_region(self.tp, x, x_up)
        query, query_up = apply_norm(
            self.query_norm, self.query(x, x_up, open_tokens=open_tokens), open_tokens
        )
        key, key_up = apply_norm(
            self.key_norm, self.key(x, x_up, open_tokens=open_tokens), open_tokens
        )
        value, value_up = self.value(x, x_up, open_tokens=open_tokens)
        # Base and added heads in calls of their own: a kernel may split its work, and so round, by
        # the number of heads.
        heads = self._attend(query, key, value, context)
        heads_up: Tensor | None = None
        if query_up is not None and key_up is not None and value_up is not None:
            heads_up = self._attend(query_up, key_up, value_up, context)
            if self.share_of_expansion_heads != 1.0:
                heads_up = heads_up * self.share_of_expansion_heads
        return leave_region(self.tp, *self.output(heads, heads_up, open_tokens=open_tokens))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query: [B, S, H·K], key and value: [B, S, H_kv·K] -> [B, S, H·K]."""
        query = query.unflatten(-1, (-1, self.head_dim))
        key = key.unflatten(-1, (-1, self.head_dim))
        value = value.unflatten(-1, (-1, self.head_dim))
        if context.rotary is not None:
            query = context.rotary.rotate(query)
            key = context.rotary.rotate(key)
        return context.attend(query, key, value).flatten(2)


class FeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.activation = ACTIVATIONS[spec.activation]
        hidden = residual_parts(spec, plan)
        inner: Parts = (_features(spec.widths.intermediate_size), None)
        collaborative = False
        added = added_widths(plan)
        if plan is not None and added is not None:
            inner = (inner[0], _features(added.intermediate_size))
            collaborative = plan.has_expansion_to_base(layer, "ffn")

        column = partial(
            WidenedColumnLinear, bias=spec.ffn_bias, collaborative=collaborative, tp=tp
        )
        self.gate: WidenedColumnLinear | None = None
        if spec.gated_ffn:
            self.gate = column(hidden, inner)
        self.up = column(hidden, inner)
        self.down = WidenedRowLinear(
            inner, hidden, bias=spec.ffn_bias, collaborative=collaborative, tp=tp
        )

    def forward(
        self, x: Tensor, x_up: Tensor | None, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        x, x_up = enter_region(self.tp, x, x_up)
        inner, inner_up = self.up(x, x_up, open_tokens=open_tokens)
        gate: Tensor | None = None
        gate_up: Tensor | None = None
        if self.gate is not None:
            gate, gate_up = self.gate(x, x_up, open_tokens=open_tokens)
        inner = self._activate(inner, gate)
        if inner_up is not None:
            inner_up = self._activate(inner_up, gate_up)
        return leave_region(self.tp, *self.down(inner, inner_up, open_tokens=open_tokens))

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            return self.activation(inner)
        return self.activation(gate) * inner


def widened_norm(spec: DecoderSpec, plan: ExpansionPlan | None, tp: TensorParallel) -> WidenedNorm:
    """A norm over both residual streams."""
    added = added_widths(plan)
    return WidenedNorm(
        spec.norm,
        spec.widths.hidden_size,
        None if added is None else added.hidden_size,
        eps=spec.norm_eps,
        statistics="separate" if plan is None else plan.norm,
        normed=None if spec.residual is None else spec.residual.normed,
        gain=_gain(spec),
        tp=tp,
    )


def _gain(spec: DecoderSpec) -> Gain:
    return Gain(spec.gain_offset, spec.rounds_once)


def head_norm(
    spec: DecoderSpec, plan: ExpansionPlan | None, heads: Parts, tp: TensorParallel
) -> WidenedHeadNorm | None:
    """The norm of queries or keys, where the base has one: of each head, or of all together."""
    if spec.query_key_norm == "none":
        return None
    base, added = heads
    is_of_all = spec.query_key_norm == "all"
    size = base.size if is_of_all else spec.head_dim
    added_size: int | None = None
    if added is not None:
        added_size = added.size if is_of_all else spec.head_dim
    if plan is not None and plan.norm == "base" and not is_of_all:
        # An ordinary wider model has one gain for all its heads: the base's.
        added_size = None
    return WidenedHeadNorm(size, added_size, eps=spec.norm_eps, gain=_gain(spec), tp=tp)


def residual_parts(spec: DecoderSpec, plan: ExpansionPlan | None) -> Parts:
    """The residual streams as a side of linear maps; they are not split over the ranks."""
    base = Part(spec.widths.hidden_size, 1)
    added = added_widths(plan)
    if added is None:
        return base, None
    return base, Part(added.hidden_size, 1)


def _features(count: int) -> Part:
    return Part(count, count)


def apply_norm(
    norm: nn.Module | None, streams: Streams, open_tokens: OpenTokens = ALL_OPEN
) -> Streams:
    """The streams through `norm`, if there is one; `open_tokens` as in `DecoderLayer`."""
    normed: Streams = streams
    if norm is not None:
        normed = norm(*streams, open_tokens=open_tokens)
    return normed


def _add(streams: Streams, change: Streams) -> Streams:
    x, x_up = streams
    y, y_up = change
    if x_up is None or y_up is None:
        return x + y, None
    return x + y, x_up + y_up
