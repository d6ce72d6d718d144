"""A decoder layer on two streams, for the Llama family and GPT-NeoX: norms, causal self-attention, feed-forward.

SCALE adds attention heads and inner width and keeps them separate from the base's: base and added heads attend in two
calls. So the base's call is the same as in the base model, and has no backward pass where the base stream depends on no
trained parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.spec import DecoderSpec, RotarySpec
from pipeline.parallel.collectives import enter_region, leave_region
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.layers import Part, Parts, Streams, WidenedColumnLinear, WidenedNorm, WidenedRowLinear
from pipeline.scale.plan import ExpansionPlan, Widths

_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


class DecoderLayer(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes; with sequence parallelism [B, S / tp_size, ...].

    `collaborative`: at or above `l_fp`, where the base stream may depend on trained parameters. `added`: a layer that
    the base does not have. `masked` skips what was added to the base's path: every W12, the adapters, and an added
    layer as a whole. As a mask [B, S, 1] it skips W12 for some of the tokens.
    """

    def __init__(
        self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, added: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.collaborative = plan is None or layer >= plan.l_fp
        self.added = added
        self.parallel_residual = spec.parallel_residual
        self.attention_norm = widened_norm(spec, plan, tp)
        self.attention = Attention(spec, plan, layer, tp=tp)
        self.ffn_norm = widened_norm(spec, plan, tp)
        self.ffn = FeedForward(spec, plan, layer, tp=tp)

    def forward(self, x: Tensor, x_up: Tensor | None, context: Context, masked: bool | Tensor = False) -> Streams:
        if masked is True and self.added:
            return x, x_up
        attended = self.attention(*self.attention_norm(x, x_up), context, masked=masked)
        if self.parallel_residual:
            fed = self.ffn(*self.ffn_norm(x, x_up), masked=masked)
            return _add(_add((x, x_up), attended), fed)
        x, x_up = _add((x, x_up), attended)
        return _add((x, x_up), self.ffn(*self.ffn_norm(x, x_up), masked=masked))


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
        normed_size=spec.normed_size,
        tp=tp,
    )


class Attention(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = spec.head_dim
        base, added = spec.widths, plan.expansion if plan else None
        hidden = _hidden(base, added)
        heads = self._heads(base.num_attention_heads, added.num_attention_heads if added else None)
        kv_heads = self._heads(base.num_key_value_heads, added.num_key_value_heads if added else None)
        collaborative = plan is not None and plan.has_expansion_to_base(layer, "attention")
        column = partial(WidenedColumnLinear, bias=spec.query_key_value_bias, collaborative=collaborative, tp=tp)
        self.query = column(hidden, heads)
        self.key = column(hidden, kv_heads)
        self.value = column(hidden, kv_heads)
        self.output = WidenedRowLinear(heads, hidden, bias=spec.output_bias, collaborative=collaborative, tp=tp)
        # Each rank that holds a replicated head adds it to the sum of the output map.
        replicas = Partition(dim=0, units=added.num_attention_heads).replicas(tp.size) if added else 1
        self.share_of_expansion_heads = 1.0 / replicas
        self.attend = F.scaled_dot_product_attention  # sizing replaces it: on meta tensors torch would not fuse

    def _heads(self, count: int, count_up: int | None) -> Parts:
        return Part(count * self.head_dim, count), Part(count_up * self.head_dim, count_up) if count_up else None

    def forward(self, x: Tensor, x_up: Tensor | None, context: Context, *, masked: bool | Tensor = False) -> Streams:
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
            # No fused CUDA kernel takes both a mask and grouped heads: torch would compute all scores [B, H, S, S].
            key, value = (heads.repeat_interleave(queries_per_key, dim=1) for heads in (key, value))
        heads = self.attend(
            query,
            key,
            value,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return heads.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """x: [B, S, D], x_up: [B, S, U] -> the same shapes."""

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, layer: int, *, tp: TensorParallel) -> None:
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
        column = partial(WidenedColumnLinear, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)
        self.gate = column(hidden, inner) if spec.gated_ffn else None
        self.up = column(hidden, inner)
        self.down = WidenedRowLinear(inner, hidden, bias=spec.ffn_bias, collaborative=collaborative, tp=tp)

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
    """What all layers of a pass share: the rotary table and, for packed documents, an additive mask [B, 1, S, S]."""

    rotary: RotaryTable
    mask: Tensor | None = None


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """The angle by which each pair of channels is rotated per position: [head_dim · fraction / 2], fp32, on the CPU."""
    rotated = int(head_dim * spec.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: Tensor, spec: RotarySpec) -> Tensor:
    """Llama 3's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    context = spec.original_max_position_embeddings
    blend = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


class RotaryEmbedding:
    """Makes the rotary tables of a decoder. Base and added heads use the same ones.

    The frequencies are copied to the device once: a copy for every batch would make the host wait for the GPU. They are
    not a buffer, because DeepSpeed would cast a buffer to 16 bits.
    """

    def __init__(self, spec: RotarySpec, head_dim: int) -> None:
        self._spec = spec
        self._head_dim = head_dim
        self._frequencies: Tensor | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """The table in `dtype` for positions: [B, S] or [S]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self._spec, self._head_dim).to(positions.device)
        return RotaryTable(self._frequencies, positions, dtype)


class RotaryTable:
    """cos and sin of the angles at given positions, each [(B,) 1, S, K · fraction]."""

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        """frequencies: [K · fraction / 2], positions: [B, S] or [S]."""
        angles = positions.float().unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-3)
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, H, S, K] -> the same shape; channels beyond the rotated fraction of K stay unchanged."""
        width = self.cos.shape[-1]
        rotated = heads[..., :width]
        half = width // 2
        partner = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
        rotated = rotated * self.cos + partner * self.sin
        return rotated if width == heads.shape[-1] else torch.cat([rotated, heads[..., width:]], dim=-1)
