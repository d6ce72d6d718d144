"""A decoder layer on two streams, with the features of a `DecoderSpec`: norms, causal self-attention, feed-forward.

SCALE adds attention heads and inner width and keeps them separate from the base's: base and added heads attend in two
calls. So the base's call is the same as in the base model, and has no backward pass where the base stream depends on no
trained parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.model.attention import Attend, Documents
from pipeline.model.mixture import MixtureFeedForward
from pipeline.model.spec import ACTIVATIONS, DecoderSpec, RotarySpec
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan, Widths
from pipeline.scale.widened_linear import (
    Part,
    Parts,
    Streams,
    WidenedColumnLinear,
    WidenedRowLinear,
)
from pipeline.scale.widened_norm import WidenedHeadNorm, WidenedNorm
from pipeline.scale_math import frequencies_by_length, rotary_table, rotate


class DecoderLayer(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes; with sequence parallelism [B, S / tp_size, ...].

    `collaborative`: at or above `l_fp`, where the base stream may depend on trained parameters. `added`: a layer that
    the base does not have. `masked` skips what was added to the base's path: every W12, the adapters, and an added
    layer as a whole. As a mask [B, S, 1] it skips W12 for some of the tokens.
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
        self.collaborative = plan is None or layer >= plan.l_fp
        self.added = added
        self.kind = spec.layers[layer]
        self.parallel_residual = spec.parallel_residual
        before, after = spec.norm_placement != "after", spec.norm_placement != "before"
        self.attention_norm = widened_norm(spec, plan, tp) if before else None
        self.attention = Attention(spec, plan, layer, tp=tp)
        self.attention_post_norm = widened_norm(spec, plan, tp) if after else None
        self.ffn_norm = widened_norm(spec, plan, tp) if before else None
        self.ffn = (MixtureFeedForward if self.kind.has_experts else FeedForward)(
            spec, plan, layer, tp=tp
        )
        self.ffn_post_norm = widened_norm(spec, plan, tp) if after else None

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, masked: bool | Tensor = False
    ) -> Streams:
        if masked is True and self.added:
            return x, x_up
        streams = x, x_up
        attended = self.attention(*_normed(self.attention_norm, streams), context, masked=masked)
        summed = _add(streams, _normed(self.attention_post_norm, attended))
        fed = self.ffn(
            *_normed(self.ffn_norm, streams if self.parallel_residual else summed), masked=masked
        )
        return _add(summed, _normed(self.ffn_post_norm, fed))


def _normed(norm: nn.Module | None, streams: Streams) -> Streams:
    normed: Streams = streams if norm is None else norm(*streams)
    return normed


def _add(streams: Streams, change: Streams) -> Streams:
    (x, x_up), (y, y_up) = streams, change
    return x + y, None if x_up is None or y_up is None else x_up + y_up


def widened_norm(spec: DecoderSpec, plan: ExpansionPlan | None, tp: TensorParallel) -> WidenedNorm:
    """The norm over both residual streams of a decoder."""
    return WidenedNorm(
        spec.norm,
        spec.widths.hidden_size,
        plan.expansion.hidden_size if plan else None,
        eps=spec.norm_eps,
        statistics=plan.norm if plan else "separate",
        normed=None if spec.residual is None else spec.residual.normed,
        gain_offset=spec.gain_offset,
        tp=tp,
    )


class Attention(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = spec.head_dim
        base, added = spec.widths, plan.expansion if plan else None
        hidden = _hidden(base, added)
        heads = self._heads(base.num_attention_heads, added.num_attention_heads if added else None)
        kv_heads = self._heads(
            base.num_key_value_heads, added.num_key_value_heads if added else None
        )
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "attention")
        column = partial(
            WidenedColumnLinear, bias=spec.query_key_value_bias, collaborative=collaborative, tp=tp
        )
        self.query = column(hidden, heads)
        self.key = column(hidden, kv_heads)
        self.value = column(hidden, kv_heads)
        self.query_norm = self._head_norm(spec, plan, heads)
        self.key_norm = self._head_norm(spec, plan, kv_heads)
        self.output = WidenedRowLinear(
            heads, hidden, bias=spec.output_bias, collaborative=collaborative, tp=tp
        )
        # Each rank that holds a replicated head adds it to the sum of the output map.
        replicas = (
            Partition(dim=0, units=added.num_attention_heads).replicas(tp.size) if added else 1
        )
        self.share_of_expansion_heads = 1.0 / replicas

    def _heads(self, count: int, count_up: int | None) -> Parts:
        return Part(count * self.head_dim, count), Part(
            count_up * self.head_dim, count_up
        ) if count_up else None

    def _head_norm(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, heads: Parts
    ) -> WidenedHeadNorm | None:
        if spec.query_key_norm == "none":
            return None
        of_all = spec.query_key_norm == "all"
        size, added = heads[0].size if of_all else self.head_dim, heads[1]
        expansion_size = None if added is None else added.size if of_all else self.head_dim
        if plan is not None and plan.norm == "base" and not of_all:
            expansion_size = None
        eps, offset = spec.norm_eps, spec.gain_offset
        return WidenedHeadNorm(size, expansion_size, eps=eps, gain_offset=offset, tp=self.tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, *, masked: bool | Tensor = False
    ) -> Streams:
        x, x_up = enter_region(self.tp, x, x_up)
        query, query_up = _normed(self.query_norm, self.query(x, x_up, masked=masked))
        key, key_up = _normed(self.key_norm, self.key(x, x_up, masked=masked))
        value, value_up = self.value(x, x_up, masked=masked)
        heads = self._attend(query, key, value, context)
        heads_up = None
        if query_up is not None and key_up is not None and value_up is not None:
            heads_up = self._attend(query_up, key_up, value_up, context)
            if self.share_of_expansion_heads != 1.0:
                heads_up = heads_up * self.share_of_expansion_heads
        return leave_region(self.tp, *self.output(heads, heads_up, masked=masked))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query: [B, S, H·K], key and value: [B, S, H_kv·K] -> [B, S, H·K]."""
        query, key, value = (
            flat.unflatten(-1, (-1, self.head_dim)) for flat in (query, key, value)
        )
        if context.rotary is not None:
            query, key = context.rotary.rotate(query), context.rotary.rotate(key)
        return context.attend(query, key, value).flatten(2)


class FeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.activation = ACTIVATIONS[spec.activation]
        base, added = spec.widths, plan.expansion if plan else None
        hidden = _hidden(base, added)
        inner = (
            Part(base.intermediate_size, base.intermediate_size),
            Part(added.intermediate_size, added.intermediate_size) if added else None,
        )
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "ffn")
        column = partial(
            WidenedColumnLinear, bias=spec.ffn_bias, collaborative=collaborative, tp=tp
        )
        self.gate = column(hidden, inner) if spec.gated_ffn else None
        self.up = column(hidden, inner)
        self.down = WidenedRowLinear(
            inner, hidden, bias=spec.ffn_bias, collaborative=collaborative, tp=tp
        )

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool | Tensor = False) -> Streams:
        x, x_up = enter_region(self.tp, x, x_up)
        inner, inner_up = self.up(x, x_up, masked=masked)
        gate, gate_up = (None, None) if self.gate is None else self.gate(x, x_up, masked=masked)
        inner = self._activate(inner, gate)
        inner_up = None if inner_up is None else self._activate(inner_up, gate_up)
        return leave_region(self.tp, *self.down(inner, inner_up, masked=masked))

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        return self.activation(inner) if gate is None else self.activation(gate) * inner


def _hidden(base: Widths, added: Widths | None) -> Parts:
    """The residual streams, which are not split over the ranks."""
    return Part(base.hidden_size, 1), Part(added.hidden_size, 1) if added else None


@dataclass(frozen=True)
class Context:
    """What the layers of one kind share in a pass: the rotary table, and the attention kernel for the batch."""

    rotary: RotaryTable | None
    attend: Attend


class RotaryEmbedding:
    """Makes the rotary tables of a decoder. Base and added heads use the same ones.

    The frequencies are copied to the device once: a copy for every batch would make the host wait for the GPU. They are
    not a buffer, because DeepSpeed would cast a buffer to 16 bits.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}

    def table(
        self, spec: RotarySpec, positions: Tensor, documents: Documents | None, dtype: torch.dtype
    ) -> RotaryTable:
        """The table in `dtype` for positions: [B, S] or [S]."""
        frequencies = self._on_device(spec.frequencies, positions.device)
        if spec.context is not None and spec.long_frequencies is not None:
            long_frequencies = self._on_device(spec.long_frequencies, positions.device)
            lengths = _lengths(positions, documents)
            frequencies = frequencies_by_length(
                lengths, spec.context, frequencies, long_frequencies
            )
        return RotaryTable(frequencies, positions, spec.attention_factor, dtype)

    def _on_device(self, numbers: tuple[float, ...], device: torch.device) -> Tensor:
        key = numbers, device
        if key not in self._held:
            self._held[key] = torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device)
        return self._held[key]


def _lengths(positions: Tensor, documents: Documents | None) -> Tensor:
    """How long the text is that each token belongs to: its document, or [B, 1] or [1] its row."""
    if documents is None:
        return positions.amax(-1, keepdim=True) + 1
    ids = documents.ids
    last = positions.expand_as(ids).flatten()[documents.starts[1:].long() - 1] + 1
    return last.repeat_interleave(documents.starts.diff().long(), output_size=ids.numel()).view_as(
        ids
    )


class RotaryTable:
    """cos and sin of the angles at given positions, each [(B,) S, 1, R]; R channels of a head are rotated."""

    def __init__(
        self, frequencies: Tensor, positions: Tensor, factor: float, dtype: torch.dtype
    ) -> None:
        """frequencies: [R / 2], or those of each token [..., R / 2]; positions: [B, S] or [S]; `factor` scales both."""
        cos, sin = rotary_table(frequencies, positions, factor, dtype)
        self.cos = cos.unsqueeze(-2)
        self.sin = sin.unsqueeze(-2)

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, S, H, K] -> the same shape; the channels beyond R stay unchanged."""
        return rotate(heads, self.cos, self.sin)
