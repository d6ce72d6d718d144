"""Rotary position embedding. The heads that SCALE adds turn by the same table as the base's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.spec import DecoderSpec, RotarySpec
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.layers import Part, WidenedColumnLinear, WidenedNorm, WidenedRowLinear
from pipeline.scale.plan import ExpansionPlan


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """The angle per position of each rotated pair: [head_dim · fraction / 2], in fp32, on the host."""
    rotated = int(head_dim * spec.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: Tensor, spec: RotarySpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    context = spec.original_max_position_embeddings
    blend = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


class RotaryEmbedding:
    """One decoder's: it makes tables for positions, from frequencies that it sends to their device once.

    Each sending would make the host wait until a GPU has come to it. They are no buffer, which DeepSpeed would round.
    """

    def __init__(self, spec: RotarySpec, head_dim: int) -> None:
        self._spec = spec
        self._head_dim = head_dim
        self._frequencies: Tensor | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """positions: [B, S] or [S]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self._spec, self._head_dim).to(positions.device)
        return RotaryTable(self._frequencies, positions, dtype)


class RotaryTable:
    """cos and sin for given positions, and the rotation of queries and keys with them."""

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        """frequencies: as `inverse_frequencies` gives them; positions: [B, S] or [S]."""
        angles = positions.float().unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-3)
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, H, S, K]; beyond the rotated fraction of K nothing changes."""
        width = self.cos.shape[-1]
        turned = heads[..., :width]
        half = width // 2
        partner = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        turned = turned * self.cos + partner * self.sin
        return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)


# --- Causal self-attention on two streams: SCALE adds heads, and never mixes them with the base's -------------------
# Base and added heads attend in two calls. The base's call is then the one that the base model makes, and where the
# base stream depends on no trained parameter it has no backward pass.


@dataclass(frozen=True)
class Context:
    """What the layers of one pass share: the rotary table, and a mask [B, 1, S, S] where causal is not enough."""

    rotary: RotaryTable
    mask: Tensor | None = None


class Attention(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = spec.head_dim
        width, added = spec.widths, plan.expansion if plan else None
        hidden = Part(width.hidden_size, 1)
        heads = self._heads(width.num_attention_heads)
        kv_heads = self._heads(width.num_key_value_heads)
        hidden_up = Part(added.hidden_size, 1) if added else None
        heads_up = self._heads(added.num_attention_heads) if added else None
        kv_heads_up = self._heads(added.num_key_value_heads) if added else None
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "attention")

        def column(part: Part, part_up: Part | None) -> WidenedColumnLinear:
            expansion = (hidden_up, part_up) if hidden_up and part_up else None
            bias = spec.query_key_value_bias
            return WidenedColumnLinear((hidden, part), expansion, bias=bias, collaborative=collaborative, tp=tp)

        self.query = column(heads, heads_up)
        self.key = column(kv_heads, kv_heads_up)
        self.value = column(kv_heads, kv_heads_up)
        self.output = WidenedRowLinear(
            (heads, hidden),
            (heads_up, hidden_up) if heads_up and hidden_up else None,
            bias=spec.output_bias,
            collaborative=collaborative,
            tp=tp,
        )
        # A head that several ranks hold enters the sum of the output map once from each.
        replicas = Partition(dim=0, units=added.num_attention_heads).replicas(tp.size) if added else 1
        self.share_of_expansion_heads = 1.0 / replicas

    def _heads(self, count: int) -> Part:
        return Part(count * self.head_dim, count)

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, *, masked: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        x, x_up = enter_region(self.tp, x, x_up)
        query, query_up = self.query(x, x_up, masked=masked)
        key, key_up = self.key(x, x_up, masked=masked)
        value, value_up = self.value(x, x_up, masked=masked)
        heads = self._attend(query, key, value, context)
        heads_up = None
        if query_up is not None:
            heads_up = self._attend(query_up, key_up, value_up, context)
            if self.share_of_expansion_heads != 1.0:
                heads_up = heads_up * self.share_of_expansion_heads
        return leave_region(self.tp, *self.output(heads, heads_up, masked=masked))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query: [B, S, H·K], key and value: [B, S, H_kv·K] -> [B, S, H·K]."""
        query, key, value = (flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for flat in (query, key, value))
        query, key = context.rotary.rotate(query), context.rotary.rotate(key)
        queries_per_key = query.shape[1] // key.shape[1]
        if context.mask is not None and queries_per_key > 1:
            # On CUDA no fused kernel takes both a mask and grouped heads: scores [B, H, S, S] would be held instead.
            key, value = (heads.repeat_interleave(queries_per_key, dim=1) for heads in (key, value))
        heads = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return heads.transpose(1, 2).flatten(2)


# --- The feed-forward block on two streams: gated in the Llama family, plain in GPT-NeoX ----------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.activation = ACTIVATIONS[spec.activation]
        width, added = spec.widths, plan.expansion if plan else None
        hidden = Part(width.hidden_size, 1)
        inner = Part(width.intermediate_size, width.intermediate_size)
        hidden_up = Part(added.hidden_size, 1) if added else None
        inner_up = Part(added.intermediate_size, added.intermediate_size) if added else None
        into = (hidden_up, inner_up) if hidden_up and inner_up else None
        back = (inner_up, hidden_up) if hidden_up and inner_up else None
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "ffn")

        def column() -> WidenedColumnLinear:
            return WidenedColumnLinear((hidden, inner), into, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)

        self.gate = column() if spec.gated_ffn else None
        self.up = column()
        self.down = WidenedRowLinear((inner, hidden), back, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)

    def forward(self, x: Tensor, x_up: Tensor | None, *, masked: bool = False) -> tuple[Tensor, Tensor | None]:
        x, x_up = enter_region(self.tp, x, x_up)
        inner, inner_up = self.up(x, x_up, masked=masked)
        gate, gate_up = (None, None) if self.gate is None else self.gate(x, x_up, masked=masked)
        inner = self._activate(inner, gate)
        inner_up = None if inner_up is None else self._activate(inner_up, gate_up)
        return leave_region(self.tp, *self.down(inner, inner_up, masked=masked))

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        return self.activation(inner) if gate is None else self.activation(gate) * inner


# --- One decoder layer on two streams, with sequential or parallel residual -----------------------------------------


def widened_norm(spec: DecoderSpec, plan: ExpansionPlan | None, tp: TensorParallel) -> WidenedNorm:
    """The norm over both residual streams of this decoder."""
    return WidenedNorm(
        spec.norm,
        spec.widths.hidden_size,
        plan.expansion.hidden_size if plan else None,
        eps=spec.norm_eps,
        statistics=plan.norm if plan else "separate",
        normed_size=spec.normed_size,
        tp=tp,
    )


class DecoderLayer(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes.

    `masked` leaves out whatever was put between the base and its own result: every W12, the adapters, and the whole
    layer where it is `added`, that is, none of the base's. Sequence-parallel ranks have their own positions of both
    streams: [B, S / tp_size, ...].
    """

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, added: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.added = added
        self.parallel_residual = spec.parallel_residual
        self.attention_norm = widened_norm(spec, plan, tp)
        self.attention = Attention(spec, plan, layer, tp=tp)
        self.ffn_norm = widened_norm(spec, plan, tp)
        self.ffn = FeedForward(spec, plan, layer, tp=tp)

    def forward(
        self, x: Tensor, x_up: Tensor | None, context: Context, masked: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if masked and self.added:
            return x, x_up
        attended = self.attention(*self.attention_norm(x, x_up), context, masked=masked)
        if self.parallel_residual:
            fed = self.ffn(*self.ffn_norm(x, x_up), masked=masked)
            return _add(_add((x, x_up), attended), fed)
        x, x_up = _add((x, x_up), attended)
        return _add((x, x_up), self.ffn(*self.ffn_norm(x, x_up), masked=masked))


def _add(streams: tuple[Tensor, Tensor | None], change: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    (x, x_up), (y, y_up) = streams, change
    return x + y, None if x_up is None or y_up is None else x_up + y_up
