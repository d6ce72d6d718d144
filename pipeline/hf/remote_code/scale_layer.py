"""One decoder layer on both streams: attention, and a feed-forward network or a mixture
of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward  # it caps scores

from .configuration_scale import ScaleConfig
from .open_tokens import OpenTokens
from .scale_added_maps import AddedColumnMap, AddedRowMap
from .scale_math import choose_experts, rotate, rows_by_expert
from .scale_open_weights import ScaleLowRank
from .scale_rotary import RotaryAngles
from .scale_streams import ScaleHeadNorm, ScaleLinear, ScaleNorm, StreamPath


class ScaleAttention(nn.Module):
    """Causal attention. The expansion's heads follow the base's; each path has its own set of all
    heads.
    """

    is_causal = True

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.scaling = config.attention_scale
        if self.scaling is None:
            self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.softcap = config.attention_softcap
        self.sliding_window = None
        if config.layer_types[layer] == "sliding_attention":
            self.sliding_window = config.sliding_window

        hidden = (config.hidden_size, config.expansion_hidden_size)
        heads = self._sizes(config.num_attention_heads, config.expansion_num_attention_heads)
        kv_heads = self._sizes(config.num_key_value_heads, config.expansion_num_key_value_heads)
        bias = config.query_key_value_bias
        collaborative = config.is_collaborative(layer, "attention")
        self.widths = heads

        def linear(
            name: str, sizes_in: tuple[int, int], sizes_out: tuple[int, int], bias: bool
        ) -> ScaleLinear:
            adapter = _adapter(config, layer, name, sizes_in[0], sizes_out[0])
            return ScaleLinear(sizes_in, sizes_out, bias, collaborative, adapter)

        self.query = linear("query", hidden, heads, bias)
        self.key = linear("key", hidden, kv_heads, bias)
        self.value = linear("value", hidden, kv_heads, bias)
        self.query_norm: ScaleHeadNorm | None = None
        self.key_norm: ScaleHeadNorm | None = None
        if config.query_key_norm != "none":
            self.query_norm = ScaleHeadNorm(config, layer, heads)
            self.key_norm = ScaleHeadNorm(config, layer, kv_heads)
        self.output = linear("output", heads, hidden, config.output_bias)

    def _sizes(self, heads: int, expansion_heads: int) -> tuple[int, int]:
        """The channels of the base's heads and of the expansion's, of which there are `heads` in
        all.
        """
        return (heads - expansion_heads) * self.head_dim, expansion_heads * self.head_dim

    def forward(
        self,
        paths: list[StreamPath],
        rotary: RotaryAngles | None,
        mask: Any,
        cache: Any,
        options: dict[str, Any],
    ) -> list[StreamPath]:
        query = self._heads(self.query, self.query_norm, paths)
        key = self._heads(self.key, self.key_norm, paths)
        value = self._heads(self.value, None, paths)
        if rotary is not None:
            query = rotate(query, rotary.cos, rotary.sin)
            key = rotate(key, rotary.cos, rotary.sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        # The base alone, beside another path below the gate, has none of the expansion's heads.
        widths = []
        for path in paths:
            widths.append(self.widths[0] if path.x_up is None else sum(self.widths))
        attended = self._attend(query, key, value, mask, options).split(widths, dim=-1)

        changes = []
        for path, heads in zip(paths, attended, strict=True):
            if path.x_up is None:
                x, x_up = self.output(heads, None, path.open_tokens)
            else:
                of_base, of_expansion = heads.split(self.widths, dim=-1)
                x, x_up = self.output(of_base, of_expansion, path.open_tokens)
            changes.append(StreamPath(x, x_up, path.open_tokens))
        return changes

    def _heads(
        self, projection: ScaleLinear, norm: ScaleHeadNorm | None, paths: list[StreamPath]
    ) -> Tensor:
        """The heads of all paths [B, H, S, K]: of each path those of the base, then those of the
        expansion.

        This order keeps the query heads with their key/value head.
        """
        parts = []
        for path in paths:
            heads, heads_up = projection(path.x, path.x_up, path.open_tokens)
            if norm is not None:
                heads, heads_up = norm(heads, heads_up, path.open_tokens)
            parts.append(heads)
            if heads_up is not None:
                parts.append(heads_up)
        # The base alone has one part: `cat` would copy it.
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return joined.view(*joined.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Heads [B, H, S, K] -> [B, S, H K]."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if self.sliding_window is not None:
            options = {**options, "sliding_window": self.sliding_window}
        if self.softcap is not None:
            options = {**options, "softcap": self.softcap}
        heads, _ = attend(
            self, query, key, value, mask, scaling=self.scaling, dropout=0.0, **options
        )
        flat: Tensor = heads.flatten(2)
        return flat


def _adapter(
    config: ScaleConfig, layer: int, name: str, size_in: int, size_out: int
) -> ScaleLowRank | None:
    """What open tokens add to the linear map `name` of `layer`; None: nothing."""
    rank = config.own_rank_of(layer, name)
    if rank is None:
        return None
    return ScaleLowRank(size_in, size_out, rank, config.own_scale)


class ScaleFeedForward(nn.Module):
    """The feed-forward network: gated (Llama) or plain (GPT-NeoX)."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        hidden = (config.hidden_size, config.expansion_hidden_size)
        inner = (config.intermediate_size, config.expansion_intermediate_size)
        bias = config.ffn_bias
        collaborative = config.is_collaborative(layer, "ffn")
        self.activation = ACT2FN[config.hidden_act]

        def linear(name: str, sizes_in: tuple[int, int], sizes_out: tuple[int, int]) -> ScaleLinear:
            adapter = _adapter(config, layer, name, sizes_in[0], sizes_out[0])
            return ScaleLinear(sizes_in, sizes_out, bias, collaborative, adapter)

        self.gate: ScaleLinear | None = None
        if config.gated_ffn:
            self.gate = linear("gate", hidden, inner)
        self.up = linear("up", hidden, inner)
        self.down = linear("down", inner, hidden)

    def forward(self, path: StreamPath) -> StreamPath:
        inner, inner_up = self.up(path.x, path.x_up, path.open_tokens)
        gate: Tensor | None = None
        gate_up: Tensor | None = None
        if self.gate is not None:
            gate, gate_up = self.gate(path.x, path.x_up, path.open_tokens)
        inner = self._activated(inner, gate)
        if inner_up is not None:
            inner_up = self._activated(inner_up, gate_up)
        x, x_up = self.down(inner, inner_up, path.open_tokens)
        return StreamPath(x, x_up, path.open_tokens)

    def _activated(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            activated: Tensor = self.activation(inner)
        else:
            activated = self.activation(gate) * inner
        return activated


class ScaleExpertLinear(nn.Module):
    """A linear map of every expert: rows x [N, in], sorted by expert, which end at `ends` [experts]
    -> [N, out].
    """

    def __init__(self, experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.is_meta:
            return F.linear(x, self.weight[0])
        if self._has_grouped_product(x):
            grouped: Tensor = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
            return grouped
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        products = []
        for rows, weight in zip(x.split(counts), self.weight, strict=True):
            if len(rows):
                products.append(F.linear(rows, weight))
        return torch.cat(products)

    def _has_grouped_product(self, x: Tensor) -> bool:
        """Whether torch has one product for all experts: on GPUs from Ampere on, of rows of whole
        16 bytes.
        """
        if not x.is_cuda or not hasattr(F, "grouped_mm"):
            return False
        is_aligned = all(size * x.element_size() % 16 == 0 for size in self.weight.shape[1:])
        return is_aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


class ScaleMixture(nn.Module):
    """A mixture of experts: the base's router and experts on x alone, and the expansion's FFN on
    both streams.

    Of the down map, base_to_expansion reads the sum of the experts, not the inner activations of
    those that ran.
    """

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        assert config.mixture is not None, "the config names layers with experts"
        self.mixture = config.mixture
        self.activation = ACT2FN[config.hidden_act]
        size = config.hidden_size
        self.base = self._base_modules(config, layer)
        up = config.expansion_hidden_size
        if up == 0:
            return
        # The blocks of the expansion; the experts take the place of `base`.
        inner = config.expansion_intermediate_size
        collaborative = config.is_collaborative(layer, "ffn")
        self.gate = AddedColumnMap((size, up), inner)
        self.up = AddedColumnMap((size, up), inner)
        self.down = AddedRowMap((size, up), inner, collaborative=collaborative)

    def _base_modules(self, config: ScaleConfig, layer: int) -> nn.ModuleDict:
        """The base's router, experts and shared expert, with what open tokens add to the last."""
        size = config.hidden_size
        experts = self.mixture["experts"]
        width = self.mixture["intermediate_size"]
        router = nn.Linear(size, experts, bias=False)
        if self.mixture["sigmoid"]:
            # The sum of its rows is the bias: three numbers of 16 bits hold one of 32.
            router.bias = nn.Parameter(torch.empty(3, experts))
        maps = nn.ModuleDict()
        maps["gate"] = ScaleExpertLinear(experts, size, width)
        maps["up"] = ScaleExpertLinear(experts, size, width)
        maps["down"] = ScaleExpertLinear(experts, width, size)
        base = nn.ModuleDict({"router": router, "experts": maps})

        shared_width = self.mixture["shared_size"]
        if shared_width:
            shared = nn.ModuleDict()
            shared["gate"] = _linear_maps(base=(size, shared_width))
            shared["up"] = _linear_maps(base=(size, shared_width))
            shared["down"] = _linear_maps(base=(shared_width, size))
            for name in ("gate", "up", "down"):
                sizes = (shared_width, size) if name == "down" else (size, shared_width)
                adapter = _adapter(config, layer, name, *sizes)
                if adapter is not None:
                    shared[name].add_module("adapter", adapter)
            if self.mixture["gated"]:
                shared.weight = nn.Parameter(torch.empty(1, size))
            base["shared"] = shared
        return base

    def forward(self, path: StreamPath) -> StreamPath:
        x, x_up, open_tokens = path
        rows = x.flatten(0, 1)
        y = self._experts_sum(rows)
        if "shared" in self.base:
            y = y + self._shared_expert(rows, open_tokens.like(rows))
        y = y.view_as(x)
        if x_up is None:
            return path._replace(x=y)
        inner = self.activation(self.gate(x, x_up)) * self.up(x, x_up)
        y, y_up = self.down(y, inner, open_tokens)
        return path._replace(x=y, x_up=y_up)

    def _experts_sum(self, x: Tensor) -> Tensor:
        """x [N, D] -> the weighted sum of the k experts that each token takes, [N, D]."""
        router: Any = self.base["router"]
        maps: Any = self.base["experts"]
        top_k = self.mixture["top_k"]
        weights, chosen, _ = choose_experts(
            x, router.weight, router.bias, top_k, self.mixture["normalised"], self.mixture["scale"]
        )
        order, ends = rows_by_expert(chosen, self.mixture["experts"])
        tokens = x[order // top_k]
        inner = self.activation(maps["gate"](tokens, ends)) * maps["up"](tokens, ends)
        # The down map is linear: weighting the narrower inner activations costs less than weighting
        # its results.
        weighted = inner * weights.to(x.dtype).flatten()[order].unsqueeze(-1)
        found = maps["down"](weighted, ends)
        by_token = torch.empty_like(found).index_copy(0, order, found)
        return by_token.unflatten(0, (-1, top_k)).sum(1)

    def _shared_expert(self, x: Tensor, open_tokens: OpenTokens) -> Tensor:
        """x [N, D] -> [N, D]: the expert that every token takes beside the others."""
        shared: Any = self.base["shared"]

        def mapped(name: str, x: Tensor) -> Tensor:
            maps = shared[name]
            y: Tensor = maps["base"](x)
            if "adapter" in maps:
                y = open_tokens.add(y, maps["adapter"], x)
            return y

        inner = self.activation(mapped("gate", x)) * mapped("up", x)
        y = mapped("down", inner)
        if self.mixture["gated"]:
            y = F.linear(x, shared.weight).sigmoid() * y
        return y


def _linear_maps(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Linear maps without bias by their names, of (in, out) channels."""
    maps = nn.ModuleDict()
    for name, (size_in, size_out) in sizes.items():
        maps[name] = nn.Linear(size_in, size_out, bias=False)
    return maps


class ScaleLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One decoder layer, on one path or on the router's two: norms before and after, sequential or
    parallel residual.
    """

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.layer_type = config.layer_types[layer]
        # Which of the model's rotary tables it reads; None: it has no position embedding.
        self.rotary_table = config.layer_rotary[layer]
        self.parallel_residual = config.parallel_residual
        has_norms_before = config.norm_placement != "after"
        has_norms_after = config.norm_placement != "before"
        self.attention_norm = ScaleNorm(config, layer) if has_norms_before else None
        self.attention = ScaleAttention(config, layer)
        self.attention_post_norm = ScaleNorm(config, layer) if has_norms_after else None
        self.ffn_norm = ScaleNorm(config, layer) if has_norms_before else None
        self.ffn: nn.Module
        if layer in config.expert_layers:
            self.ffn = ScaleMixture(config, layer)
        else:
            self.ffn = ScaleFeedForward(config, layer)
        self.ffn_post_norm = ScaleNorm(config, layer) if has_norms_after else None

    def forward(
        self,
        *streams: Tensor | None,
        open_tokens: list[OpenTokens],
        rotary: RotaryAngles | None,
        mask: Any,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """x and x_up of each path -> x and x_up of each path.

        They are positional arguments of their own, as a reentrant checkpoint sees only those
        tensors. `options` are for the attention function, such as a server's own cache.
        """
        paths = []
        for x, x_up, path_open in zip(streams[::2], streams[1::2], open_tokens, strict=True):
            assert x is not None
            paths.append(StreamPath(x, x_up, path_open))

        attention_inputs = [path.normed(self.attention_norm) for path in paths]
        attended = self.attention(attention_inputs, rotary, mask, past_key_values, options)

        results: list[Tensor | None] = []
        for path, change in zip(paths, attended, strict=True):
            change = change.normed(self.attention_post_norm)
            if not self.parallel_residual:
                path = _add(path, change)
            fed = self.ffn(path.normed(self.ffn_norm)).normed(self.ffn_post_norm)
            if self.parallel_residual:
                # In the order of GPT-NeoX: another one rounds otherwise.
                fed = _add(fed, change)
            path = _add(path, fed)
            results += [path.x, path.x_up]
        return tuple(results)


def _add(path: StreamPath, change: StreamPath) -> StreamPath:
    """Both streams with their changes added."""
    x_up = path.x_up
    if x_up is not None and change.x_up is not None:
        x_up = x_up + change.x_up
    return StreamPath(path.x + change.x, x_up, path.open_tokens)
