"""Causal self-attention on two streams: SCALE adds heads, and never mixes them with the base's.

Base and added heads attend in two calls. The base's call is then the one that the base model makes, and where the base
stream depends on no trained parameter it has no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.rotary import RotaryTable
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.regions import enter_region, leave_region
from pipeline.parallel.sharding import Partition
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.linear import Part, WidenedColumnLinear, WidenedRowLinear
from pipeline.scale.plan import ExpansionPlan


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
