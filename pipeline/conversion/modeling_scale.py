"""A language model widened by SCALE, for `transformers`. This file is shipped with the weights.

It needs torch and transformers alone:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

A frozen base of width D has an expansion of width U: the residual stream is two tensors, `x` and `x_up`, and every
linear map has four blocks ("SCALE: Upscaled Continual Learning of Large Language Models", Eq. 1):

    [ Y    ]   [ base               expansion_to_base      ] [ X    ]
    [ Y^up ] = [ base_to_expansion  expansion_to_expansion ] [ X^up ]

`expansion_to_base` exists only in collaborative layers. A routed model runs the layers above `l_fp` twice, with and
without those blocks, and takes per token the path that the router chooses (Eq. 5).

With a gate (`gate_layer` is not None) a probe on the base's own stream decides per token whether the text is new. A
closed token takes no expansion_to_base block and nothing of the expansion's logits; a routed model gives it the path
without those blocks, and an open one the other. Tokens that the base does not have (from `base_vocab_size` on) are
open, and none follows a closed token. With `gate_lower` some tokens are neither: they get the mean of both
probabilities, for which the layers from `gate_layer` on run twice, with these tokens closed and with them open.

In inference a text pays for the expansion from where the gate first opens. Until then the base runs alone; then the
whole text so far is computed anew, with the expansion. See `ScaleForCausalLM.streams`.

Shapes: B batch, S sequence, D hidden, U expansion, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.versions import require_version

NEEDED = "5.4.0"
"""The oldest transformers that runs this file; an older one would fail at one of the imports below."""
NEVER = -1e30
"""A logit whose probability is 0; finite, so that logits can be subtracted."""
require_version(f"transformers>={NEEDED}", "This model's code needs it: pip install -U transformers")

from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402
from transformers.masking_utils import create_masks_for_generate  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward  # noqa: E402  # it caps scores
from transformers.utils import can_return_tuple  # noqa: E402


class ScaleConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes: what was added is `expansion_…`. Heads are all heads, as caches are sized by them; the rest is the base's.
    `rotary` lists rotary embeddings as numbers, and `layer_rotary` says which of them each layer has (None: none).
    The FFN of `expert_layers` is the `mixture` of experts. The first `base_vocab_size` tokens (None: all) are the
    base's: Route compares their logits alone, as in training.
    """

    model_type = "scale"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 172
    num_hidden_layers: int = 2
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 8
    max_position_embeddings: int = 512
    expansion_hidden_size: int = 32
    expansion_intermediate_size: int = 86
    expansion_num_attention_heads: int = 4
    expansion_num_key_value_heads: int = 4
    l_fp: int = 2
    collaborative_modules: list[str] | tuple[str, ...] = ()
    routed: bool = False
    router_threshold: float = 0.5
    base_vocab_size: int | None = None
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_statistics: str = "separate"
    normed_size: int | None = None
    rest_scale: float = 0.0
    hidden_act: str = "silu"
    gated_ffn: bool = True
    query_key_value_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    parallel_residual: bool = False
    norm_placement: str = "before"
    gain_offset: bool = False
    query_key_norm: str = "none"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    layer_types: list[str] | tuple[()] = ()
    sliding_window: int | None = None
    mixture: dict[str, Any] | None = None
    expert_layers: list[int] | tuple[()] = ()
    rotary: list[dict[str, Any]] | tuple[()] = ()
    layer_rotary: list[int | None] | tuple[()] = ()
    gate_layer: int | None = None
    gate_features: str = "token"
    gate_decay: float = 0.8
    gate_bias: float = 0.0
    gate_threshold: float = 0.0
    gate_lower: float | None = None
    use_cache: bool = True

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        # transformers before and after configurations became dataclasses: both take this.
        for name in ScaleConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(ScaleConfig, name)))
        if isinstance(self.rotary, dict):
            raise ValueError("rotary: written by an earlier version of this model's code; convert the checkpoint again")
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        self.layer_rotary = self.layer_rotary or [None] * self.num_hidden_layers
        super().__init__(**kwargs)

    def is_collaborative(self, layer: int, module: str) -> bool:
        """Whether `module` of `layer` has expansion_to_base blocks."""
        return layer >= self.l_fp and module in self.collaborative_modules

    def why_not_packed(self) -> str | None:
        """Why the texts of several requests cannot be one row of tokens, as servers batch them; None if they can."""
        if any(spec["context"] is not None for spec in self.rotary):
            return "its rotary frequencies change with a text's length"
        if self.gate_layer is not None and self.gate_features == "token+running_mean":
            return "its gate reads a running mean, which servers do not cache; fit one with features: token"
        if self.gate_lower is not None:
            return "its gate takes the mean of two models where it is undecided; fit one with undecided: closed"
        return None


class StreamPath(NamedTuple):
    """The streams x [B, S, D] and x_up [B, S, U] of one path.

    `masked` leaves every expansion_to_base out, as a mask [B, S, 1] for some of the tokens. With `rows` [R] only these
    sequences have an expansion stream: x_up is [R, S, U], and a mask [R, S, 1]. Maps and norms leave an x_up of none as
    it is.
    """

    x: Tensor
    x_up: Tensor
    masked: bool | Tensor = False
    rows: Tensor | None = None

    def normed(self, norm: nn.Module | None) -> StreamPath:
        if norm is None:
            return self
        x, x_up = norm(self.x, self.x_up, self.rows)
        return self._replace(x=x, x_up=x_up)


class WidenedLinear(nn.Module):
    """x [..., in], x_up [..., in_up] -> y [..., out], y_up [..., out_up]. Sizes are (base, expansion) pairs."""

    def __init__(self, sizes_in: tuple[int, int], sizes_out: tuple[int, int], bias: bool, collaborative: bool) -> None:
        super().__init__()
        (size_in, up_in), (size_out, up_out) = sizes_in, sizes_out
        self.base = nn.Linear(size_in, size_out, bias=bias)
        self.expansion_to_base = nn.Linear(up_in, size_out, bias=False) if collaborative else None
        self.base_to_expansion = nn.Linear(size_in, up_out, bias=bias)
        self.expansion_to_expansion = nn.Linear(up_in, up_out, bias=False)

    def forward(
        self, x: Tensor, x_up: Tensor, masked: bool | Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = self.base(x)
        if x_up.shape[0] == 0:
            return y, x_up
        x = x if rows is None else x[rows]
        if self.expansion_to_base is not None and masked is not True:
            own = y if rows is None else y[rows]
            widened = own + self.expansion_to_base(x_up)
            widened = torch.where(masked, own, widened) if isinstance(masked, Tensor) else widened
            y = widened if rows is None else y.index_copy(0, rows, widened)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


class StreamNorm(nn.Module):
    """RMSNorm or LayerNorm of one stream [..., size], in fp32; its statistics may be those of the other stream.

    With `normed_size` (RMSNorm only) the channels after the first so many count times `rest_scale` in them. With
    `gain_offset` (RMSNorm only) the gain is 1 + weight.
    """

    def __init__(self, config: ScaleConfig, size: int, normed_size: int | None = None, kind: str | None = None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.gain_offset = config.gain_offset
        self.normed_size, self.rest_scale = normed_size, config.rest_scale
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if (kind or config.norm) == "layernorm" else None

    def forward(self, x: Tensor, statistics_of: Tensor | None = None) -> Tensor:
        source = (x if statistics_of is None else statistics_of).float()
        if self.bias is None:
            total = source[..., : self.normed_size].square().sum(-1, keepdim=True)
            if self.normed_size is not None:
                total = total + self.rest_scale**2 * source[..., self.normed_size :].square().sum(-1, keepdim=True)
            normal = x.float() * torch.rsqrt(total / source.shape[-1] + self.eps)
            if self.gain_offset:
                return (normal * (1 + self.weight.float())).to(x.dtype)
            return self.weight * normal.to(x.dtype)
        variance, mean = torch.var_mean(source, dim=-1, keepdim=True, correction=0)
        normal = (x.float() - mean) * torch.rsqrt(variance + self.eps)
        return self.weight * normal.to(x.dtype) + self.bias


class WidenedNorm(nn.Module):
    """Both streams normalised: the base by its own statistics, the expansion by its own or by the base's."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.shared = config.norm_statistics == "base"
        of_base = config.normed_size if self.shared else None
        self.base = StreamNorm(config, config.hidden_size, config.normed_size)
        self.expansion = StreamNorm(config, config.expansion_hidden_size, of_base)

    def forward(self, x: Tensor, x_up: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x_up.shape[0] == 0:
            return self.base(x), x_up
        of_rows = x if rows is None else x[rows]
        return self.base(x), self.expansion(x_up, of_rows if self.shared else None)


class WidenedHeadNorm(nn.Module):
    """Queries or keys normalised, each head or the base's and the added heads as two wholes, by own statistics."""

    def __init__(self, config: ScaleConfig, heads: tuple[int, int]) -> None:
        super().__init__()
        of_all = config.query_key_norm == "all"
        size, size_up = heads if of_all else (config.head_dim, config.head_dim)
        self.base = StreamNorm(config, size, kind="rmsnorm")
        # With the base's statistics, the added heads have the base's gains too.
        own = of_all or config.norm_statistics == "separate"
        self.expansion = StreamNorm(config, size_up, kind="rmsnorm") if own else None

    def forward(self, heads: Tensor, heads_up: Tensor) -> tuple[Tensor, Tensor]:
        if heads_up.shape[0] == 0:
            return self._normed(self.base, heads), heads_up
        up = self.base if self.expansion is None else self.expansion
        return self._normed(self.base, heads), self._normed(up, heads_up)

    @staticmethod
    def _normed(norm: StreamNorm, flat: Tensor) -> Tensor:
        return norm(flat.unflatten(-1, (-1, len(norm.weight)))).flatten(-2)


class Rotary(NamedTuple):
    """Rotary position embedding: cos and sin [B, 1, S, R]; the first R features of each head are rotated.

    A tuple, so that `device_map` moves it to the device of each layer.
    """

    cos: Tensor
    sin: Tensor

    def of(self, rows: Tensor) -> Rotary:
        return self if len(self.cos) == 1 else Rotary(self.cos[rows], self.sin[rows])

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, H, S, K]."""
        width = self.cos.shape[-1]
        rotated, rest = heads[..., :width], heads[..., width:]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([rotated, rest], dim=-1)


class ScaleRotary(nn.Module):
    """Makes the tables of one of the config's rotary embeddings.

    Numbers are buffers: a copy from the host in every pass would make it wait, and cannot be captured in a CUDA graph.
    They are held as the bits of fp32, which casting the model leaves alone.
    """

    NUMBERS = ("frequencies", "long_frequencies")

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        for name in self.NUMBERS:
            held = None if spec[name] is None else torch.empty(len(spec[name]), dtype=torch.int32)
            self.register_buffer(name, held, persistent=False)
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Sets the buffers, which `from_pretrained` makes without values."""
        for name, held in self.named_buffers():
            held.copy_(torch.tensor(self.spec[name], dtype=torch.float32, device="cpu").view(torch.int32))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """For positions [B, S]."""
        spec, device = self.spec, positions.device
        frequencies: Any
        longer: Any
        frequencies, longer = (
            None if held is None else held.view(torch.float32).to(device)
            for held in (getattr(self, name) for name in self.NUMBERS)
        )
        if spec["context"] is not None:
            length = positions.amax(-1)[:, None, None] + 1
            if longer is None:  # dynamic: theta grows with the text
                width = 2 * len(frequencies)
                stretched = spec["factor"] * length.clamp(min=spec["context"]) / spec["context"] - (spec["factor"] - 1)
                exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
                longer = 1.0 / (spec["theta"] * stretched ** (width / (width - 2))) ** exponents
            frequencies = torch.where(length > spec["context"], longer, frequencies)
        angles = positions.float().unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        factor = spec["attention_factor"]
        return Rotary((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


class ScaleAttention(nn.Module):
    """Causal attention. The expansion's heads follow the base's; each path has its own set of all heads."""

    is_causal = True

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.sliding_window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        hidden = (config.hidden_size, config.expansion_hidden_size)
        heads = self._sizes(config.num_attention_heads, config.expansion_num_attention_heads)
        kv_heads = self._sizes(config.num_key_value_heads, config.expansion_num_key_value_heads)
        bias, collaborative = config.query_key_value_bias, config.is_collaborative(layer, "attention")
        self.base_width = heads[0]
        self.query = WidenedLinear(hidden, heads, bias, collaborative)
        self.key = WidenedLinear(hidden, kv_heads, bias, collaborative)
        self.value = WidenedLinear(hidden, kv_heads, bias, collaborative)
        normed = config.query_key_norm != "none"
        self.query_norm = WidenedHeadNorm(config, heads) if normed else None
        self.key_norm = WidenedHeadNorm(config, kv_heads) if normed else None
        self.output = WidenedLinear(heads, hidden, config.output_bias, collaborative)

    def _sizes(self, heads: int, expansion_heads: int) -> tuple[int, int]:
        return (heads - expansion_heads) * self.head_dim, expansion_heads * self.head_dim

    def forward(
        self,
        paths: list[StreamPath],
        rotary: Rotary | None,
        mask: Any,  # noqa: ANN401
        cache: Any,  # noqa: ANN401
        options: dict[str, Any],
    ) -> list[tuple[Tensor, Tensor]]:
        if paths[0].rows is not None:
            return [self._of_rows(paths[0], paths[0].rows, rotary, mask, cache, options)]
        query = self._heads(self.query, self.query_norm, paths)
        key = self._heads(self.key, self.key_norm, paths)
        value = self._heads(self.value, None, paths)
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended = self._attend(query, key, value, mask, options).chunk(len(paths), dim=-1)
        return [
            self.output(flat[..., : self.base_width], flat[..., self.base_width :], path.masked)
            for flat, path in zip(attended, paths, strict=True)
        ]

    def _of_rows(
        self,
        path: StreamPath,
        rows: Tensor,
        rotary: Rotary | None,
        mask: Tensor | None,
        cache: Any,  # noqa: ANN401
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The same where only some sequences have an expansion; in a cache, the added heads of the others are zeros."""
        none, width = len(rows) == 0, len(self.key.expansion_to_expansion.weight)
        pairs = []
        for projection, norm in ((self.query, self.query_norm), (self.key, self.key_norm), (self.value, None)):
            flat, flat_up = projection(*path)
            if norm is not None:
                flat, flat_up = norm(flat, flat_up)
            base, up = self._split(flat), flat_up if none else self._split(flat_up)
            if rotary is not None and projection is not self.value:
                base, up = rotary.rotate(base), up if none else rotary.of(rows).rotate(up)
            pairs.append((base, up))
        (query, query_up), (key, key_up), (value, value_up) = pairs
        if cache is not None:
            count = key.shape[1]
            stored = [F.pad(base, (0, 0, 0, 0, 0, width // self.head_dim)) for base in (key, value)]
            if not none:
                stored[0][rows, count:], stored[1][rows, count:] = key_up, value_up
            keys, values = cache.update(*stored, self.layer_idx)
            key, value, key_up, value_up = keys[:, :count], values[:, :count], keys[rows, count:], values[rows, count:]
        attended, attended_up = self._attend(query, key, value, mask, options), query_up
        if not none:
            of_rows = mask if mask is None or len(mask) == 1 else mask[rows]
            attended_up = self._attend(query_up, key_up, value_up, of_rows, options)
        output: tuple[Tensor, Tensor] = self.output(attended, attended_up, path.masked, rows)
        return output

    def _split(self, flat: Tensor) -> Tensor:
        """[B, S, H K] -> [B, H, S, K]."""
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,  # noqa: ANN401
        options: dict[str, Any],
    ) -> Tensor:
        """Heads [B, H, S, K] -> [B, S, H K]."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.sliding_window is not None:
            options = {**options, "sliding_window": self.sliding_window}
        if self.config.attention_softcap is not None:
            options = {**options, "softcap": self.config.attention_softcap}
        heads, _ = attend(self, query, key, value, mask, scaling=self.scaling, dropout=0.0, **options)
        flat: Tensor = heads.flatten(2)
        return flat

    def _heads(self, projection: WidenedLinear, norm: WidenedHeadNorm | None, paths: list[StreamPath]) -> Tensor:
        """[B, H, S, K]: the heads of all paths, in the order that keeps query heads with their key/value head."""
        projected = [projection(*path) for path in paths]
        return self._split(
            torch.cat([part for pair in projected for part in (pair if norm is None else norm(*pair))], dim=-1)
        )


class ScaleFeedForward(nn.Module):
    """The feed-forward network: gated (Llama) or plain (GPT-NeoX)."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        hidden = (config.hidden_size, config.expansion_hidden_size)
        inner = (config.intermediate_size, config.expansion_intermediate_size)
        bias, collaborative = config.ffn_bias, config.is_collaborative(layer, "ffn")
        self.activation = ACT2FN[config.hidden_act]
        self.gate = WidenedLinear(hidden, inner, bias, collaborative) if config.gated_ffn else None
        self.up = WidenedLinear(hidden, inner, bias, collaborative)
        self.down = WidenedLinear(inner, hidden, bias, collaborative)

    def forward(self, path: StreamPath) -> tuple[Tensor, Tensor]:
        inner, inner_up = self.up(*path)
        if self.gate is None:
            inner, inner_up = self.activation(inner), self.activation(inner_up)
        else:
            gate, gate_up = self.gate(*path)
            inner, inner_up = self.activation(gate) * inner, self.activation(gate_up) * inner_up
        fed: tuple[Tensor, Tensor] = self.down(inner, inner_up, path.masked, path.rows)
        return fed


class ExpertLinear(nn.Module):
    """A linear map of every expert: rows x [N, in], sorted by expert, which end at `ends` [experts] -> [N, out]."""

    def __init__(self, experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.is_meta:
            return F.linear(x, self.weight[0])
        aligned = all(size * x.element_size() % 16 == 0 for size in self.weight.shape[1:])
        if x.is_cuda and aligned and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(x.device) >= (8, 0):
            grouped: Tensor = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
            return grouped
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        pairs = zip(x.split(counts), self.weight, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pairs if len(rows)])


class ScaleMixture(nn.Module):
    """A mixture of experts: the base's router and experts on x alone; the expansion's FFN on both streams beside them.

    Of the down map, base_to_expansion reads the sum of the experts, not the inner activations of those that ran.
    """

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        mixture: dict[str, Any] = config.mixture or {}
        size, up, inner = config.hidden_size, config.expansion_hidden_size, config.expansion_intermediate_size
        self.mixture, width, shared = mixture, mixture["intermediate_size"], mixture["shared_size"]
        self.experts, self.top_k = mixture["experts"], mixture["top_k"]
        self.activation = ACT2FN[config.hidden_act]

        def maps(**sizes: tuple[int, int]) -> nn.ModuleDict:
            return nn.ModuleDict({name: nn.Linear(*pair, bias=False) for name, pair in sizes.items()})

        sizes = {"gate": (size, width), "up": (size, width), "down": (width, size)}
        experts = nn.ModuleDict({name: ExpertLinear(self.experts, *pair) for name, pair in sizes.items()})
        self.base = nn.ModuleDict({"router": nn.Linear(size, self.experts, bias=False), "experts": experts})
        if mixture["sigmoid"]:  # the sum of three numbers of 16 bits
            self.base["router"].bias = nn.Parameter(torch.empty(3, self.experts))
        if shared:
            sizes = {"gate": (size, shared), "up": (size, shared), "down": (shared, size)}
            self.base["shared"] = nn.ModuleDict({name: maps(base=pair) for name, pair in sizes.items()})
            if mixture["gated"]:
                self.base["shared"].weight = nn.Parameter(torch.empty(1, size))
        self.gate = maps(base_to_expansion=(size, inner), expansion_to_expansion=(up, inner))
        self.up = maps(base_to_expansion=(size, inner), expansion_to_expansion=(up, inner))
        collaborative = {"expansion_to_base": (inner, size)} if config.is_collaborative(layer, "ffn") else {}
        self.down = maps(base_to_expansion=(size, up), expansion_to_expansion=(inner, up), **collaborative)

    def forward(self, path: StreamPath) -> tuple[Tensor, Tensor]:
        x, x_up, masked, rows = path
        y = self._mixed(x.flatten(0, 1)).view_as(x)
        if x_up.shape[0] == 0:
            return y, x_up
        own, x = (y, x) if rows is None else (y[rows], x[rows])
        gate, inner = (
            pair["base_to_expansion"](x) + pair["expansion_to_expansion"](x_up) for pair in (self.gate, self.up)
        )
        inner = self.activation(gate) * inner
        if "expansion_to_base" in self.down and masked is not True:
            widened = own + self.down["expansion_to_base"](inner)
            own = torch.where(masked, own, widened) if isinstance(masked, Tensor) else widened
            y = own if rows is None else y.index_copy(0, rows, own)
        return y, self.down["base_to_expansion"](own) + self.down["expansion_to_expansion"](inner)

    def _mixed(self, x: Tensor) -> Tensor:
        """x [N, D] -> the sum over the experts that each token takes."""
        weights, chosen = self._routed(x)
        taken, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(taken, torch.arange(self.experts, device=x.device), right=True, out_int32=True)
        maps: Any = self.base["experts"]
        tokens = x[order // self.top_k]
        inner = self.activation(maps["gate"](tokens, ends)) * maps["up"](tokens, ends)
        found = maps["down"](inner * weights.to(x.dtype).flatten()[order].unsqueeze(-1), ends)
        by_token = torch.empty_like(found).index_copy(0, order, found)
        y = by_token.unflatten(0, (-1, self.top_k)).sum(1)
        if "shared" not in self.base:
            return y
        shared: Any = self.base["shared"]
        gate, up, down = (shared[name]["base"] for name in ("gate", "up", "down"))
        every = down(self.activation(gate(x)) * up(x))
        return y + (F.linear(x, shared.weight).sigmoid() * every if self.mixture["gated"] else every)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> the weights of the experts that each token takes, and their numbers, both [N, k]."""
        mixture = self.mixture
        router: Any = self.base["router"]
        if mixture["sigmoid"]:
            scores = F.linear(x.float(), router.weight.float()).sigmoid()
            choice = scores + router.bias.float().sum(0)
            if mixture["top_groups"] < mixture["groups"]:
                by_group = choice.unflatten(1, (mixture["groups"], -1))
                best = by_group.topk(2, dim=-1).values.sum(-1).topk(mixture["top_groups"], dim=-1).indices
                left = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
                choice = by_group.masked_fill(left.unsqueeze(-1), -math.inf).flatten(1)
            chosen = choice.topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
        else:
            weights, chosen = F.linear(x, router.weight).float().softmax(-1).topk(self.top_k, dim=-1)
        if mixture["normalised"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all may be 0
        return weights * mixture["scale"], chosen


class ScaleLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One decoder layer on one path or on the router's two: norms before and after, sequential or parallel residual."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.attention_norm = WidenedNorm(config) if before else None
        self.attention = ScaleAttention(config, layer)
        self.attention_post_norm = WidenedNorm(config) if after else None
        self.ffn_norm = WidenedNorm(config) if before else None
        self.ffn = (ScaleMixture if layer in config.expert_layers else ScaleFeedForward)(config, layer)
        self.ffn_post_norm = WidenedNorm(config) if after else None

    def forward(
        self,
        *streams: Tensor,
        masked: list[bool | Tensor],
        rows: Tensor | None,
        rotary: Rotary | None,
        mask: Any,  # noqa: ANN401
        past_key_values: Any = None,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> tuple[Tensor, ...]:
        """x and x_up of each path -> the same: a reentrant checkpoint sees tensors among the arguments only.

        `options` are for the attention function, such as a server's own cache.
        """
        paths = [StreamPath(*pair, rows) for pair in zip(streams[::2], streams[1::2], masked, strict=True)]
        read = [path.normed(self.attention_norm) for path in paths]
        attended = self.attention(read, rotary, mask, past_key_values, options)
        summed = self._sums(paths, attended, self.attention_post_norm)
        fed = [self.ffn(path.normed(self.ffn_norm)) for path in (paths if self.parallel_residual else summed)]
        return tuple(stream for path in self._sums(summed, fed, self.ffn_post_norm) for stream in path[:2])

    @staticmethod
    def _sums(
        paths: list[StreamPath], changes: list[tuple[Tensor, Tensor]], norm: WidenedNorm | None
    ) -> list[StreamPath]:
        pairs = zip(paths, (StreamPath(*change, rows=paths[0].rows).normed(norm) for change in changes), strict=True)
        return [path._replace(x=path.x + change.x, x_up=path.x_up + change.x_up) for path, change in pairs]


class ScaleEmbedding(nn.Module):
    """The base's token embedding beside the added columns, from which the expansion stream starts: [B, S, D + U]."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.base = nn.Embedding(config.vocab_size, config.hidden_size)
        self.expansion = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.scale = config.embedding_scale

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = torch.cat([self.base(tokens), self.expansion(tokens)], dim=-1)
        # Rounded to the type of the streams, and made on their device: `ScaleRotary` says why.
        return embedded if self.scale == 1.0 else embedded * embedded.new_full((), self.scale)


class GateCache(DynamicLayer):  # type: ignore[misc]
    """What a gate's running mean has read. Static caches mask their empty places only if all layers are like theirs.

    A layer more in the cache, so that it is reordered and cropped with the others.
    """

    is_compileable = True

    @classmethod
    def of(cls, cache: Any) -> GateCache:  # noqa: ANN401
        """The layer of this kind in `cache`, which gets one."""
        for layer in cache.layers:
            if type(layer) is cls:
                return layer
        cache.layers.append(cls())
        return cache.layers[-1]


class TextCache(GateCache):
    """The text so far: its tokens and positions, and where its expansion has run."""


class ScaleGate(nn.Module):
    """Which tokens are closed (0), undecided (1), open (2), by a linear score of the base's x [B, S, D].

    Read are x over its root mean square, standardised, and with `token+running_mean` also its mean over the text so
    far, in which each token counts less by `gate_decay` with every token after it. All is computed in fp32.
    """

    WINDOW_DOUBLINGS = 7  # the mean reads 2 ** 7 tokens; what it leaves out is below the resolution of fp32

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.decay, self.bias, self.threshold = config.gate_decay, config.gate_bias, config.gate_threshold
        self.lower = self.threshold if config.gate_lower is None else config.gate_lower
        self.has_mean = config.gate_features == "token+running_mean"
        size = config.hidden_size * (2 if self.has_mean else 1)
        # Servers build a model in the type of its weights; a gate in 16 bits would decide otherwise.
        self.mean = nn.Parameter(torch.zeros(size, dtype=torch.float32))
        self.std = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float32))

    def forward(self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: Any) -> Tensor:  # noqa: ANN401
        """The decision for each token [B, S, 1]; see `scores`."""
        scores = self.scores(x, is_text, documents, cache)
        return (scores > self.threshold).long() + (scores > self.lower)

    def scores(self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: Any) -> Tensor:  # noqa: ANN401
        """The log odds that each token is new [B, S, 1]. What the running mean needs is cached.

        is_text: bool [B, S], false for padding; documents: [B, S], equal numbers where the mean may read. None: all.
        """
        features = x.float()
        features = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-12)
        if self.has_mean:
            features = torch.cat([features, self._running_mean(features, is_text, documents, cache)], dim=-1)
        return ((features - self.mean) / self.std * self.weight).sum(-1, keepdim=True) + self.bias

    def _running_mean(
        self,
        values: Tensor,
        is_text: Tensor | None,
        documents: Tensor | None,
        cache: Any,  # noqa: ANN401
    ) -> Tensor:
        length = values.shape[1]
        counts = values.new_ones(*values.shape[:2], 1) if is_text is None else is_text.to(values).unsqueeze(-1)
        values = values * counts
        if cache is not None:
            kept = GateCache.of(cache).update(values.unsqueeze(1), counts.unsqueeze(1))
            values, counts = (tensor[:, 0, -(length + 2**self.WINDOW_DOUBLINGS - 1) :] for tensor in kept)
        total = torch.cat([values, counts], dim=-1)
        for doubling in range(self.WINDOW_DOUBLINGS):
            shift = 2**doubling
            if shift >= total.shape[1]:
                break
            earlier = self.decay**shift * total[:, :-shift]
            if documents is not None:
                earlier = earlier * (documents[:, shift:] == documents[:, :-shift]).unsqueeze(-1)
            total = torch.cat([total[:, :shift], total[:, shift:] + earlier], dim=1)
        total = total[:, -length:]
        return total[..., :-1] / total[..., -1:].clamp(min=1e-30)


class ScaleOutput(nn.Module):
    """logits = base x + expansion x_up, or the router's choice of two paths. A tied base is the embedding's own.

    With `output_softcap` c a logit is c · tanh(z / c); the router compares z itself.
    """

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.threshold, self.softcap = config.router_threshold, config.output_softcap
        self.set_vocabulary(config)
        self.base = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.expansion = nn.Parameter(torch.empty(config.vocab_size, config.expansion_hidden_size))

    def set_vocabulary(self, config: ScaleConfig) -> None:
        self.of_base = config.base_vocab_size or config.vocab_size
        self.only_base_after_closed = config.gate_layer is not None and self.of_base < config.vocab_size

    def forward(self, paths: list[StreamPath], undecided: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] in fp32. The last path is the adapted one; if there are two, the first is the preserved.

        With `undecided` [B, S, 1] these tokens get the mean of both paths' probabilities, and the others the last path.
        """
        z, x_up = self._base_logits(paths[-1].x), paths[-1].x_up
        if len(paths) == 2 and undecided is None:
            z_p = self._base_logits(paths[0].x)
            old_p, old = z_p[..., : self.of_base], z[..., : self.of_base]
            preserved = (old_p * old).sum(-1, keepdim=True) > self.threshold * (
                old_p.square().sum(-1, keepdim=True) * old.square().sum(-1, keepdim=True)
            ).sqrt()
            z = torch.where(preserved, (z_p + z) / 2, z)
            x_up = torch.where(preserved, paths[0].x_up, x_up)
        rows = paths[-1].rows
        if rows is None:
            z = z + F.linear(x_up, self.expansion)
        elif len(rows):
            z = z.index_add(0, rows, F.linear(x_up, self.expansion).float())
        z = self._capped(z)
        if self.only_base_after_closed:
            closed = (x_up == 0).all(-1, keepdim=True)  # as `streams` leaves x_up
            if rows is not None:
                closed = closed.new_ones(*z.shape[:-1], 1).index_copy_(0, rows, closed)
            z = self._without_new(z, closed)
        if undecided is None:
            return z
        closed = self._capped(self._base_logits(paths[0].x))
        if self.only_base_after_closed:
            closed = self._without_new(closed, undecided)
        mean = torch.logaddexp(z.log_softmax(-1), closed.log_softmax(-1)) - math.log(2)
        return torch.where(undecided, mean, z)

    def _base_logits(self, x: Tensor) -> Tensor:
        """In a product of their own, the base's columns are the base's to the bit, whether others follow or not."""
        if not self.only_base_after_closed:
            return F.linear(x, self.base).float()
        return torch.cat([F.linear(x, self.base[: self.of_base]), F.linear(x, self.base[self.of_base :])], -1).float()

    def _without_new(self, z: Tensor, rows: Tensor) -> Tensor:
        """z [B, S, V], where in `rows` [B, S, 1] the tokens that the base does not have are impossible."""
        return z.masked_fill(rows & (torch.arange(z.shape[-1], device=z.device) >= self.of_base), NEVER)

    def _capped(self, z: Tensor) -> Tensor:
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap


def texts_of(
    x: Tensor,
    attention_mask: Any,  # noqa: ANN401
    position_ids: Tensor,
    cache: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None]:
    """What a gate reads of x [B, S, D] beside it: which tokens are text and not padding, and of which document each is.

    Both are [B, S]; None: all are, and of one document in each row.
    """
    is_text, documents = None, None
    if attention_mask is None and cache is None:
        # As for attention (`create_causal_mask`): positions that begin again are another text in the same row.
        breaks = position_ids.expand(x.shape[:2]).diff(dim=1) != 1
        documents = F.pad(breaks.cumsum(dim=1), (1, 0))
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_text = attention_mask[:, -x.shape[1] :].bool()
    return is_text, documents


class ScaleForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder-only language model widened by SCALE."""

    config_class = ScaleConfig
    base_model_prefix = ""
    _no_split_modules = ("ScaleLayer",)
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ("past_key_values",)
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ("token_gate",)
    _tied_weights_keys = {"output.base": "embedding.base.weight"}  # noqa: RUF012  # where the config ties them

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__(config)
        self.rotary = nn.ModuleList(ScaleRotary(spec) for spec in config.rotary)
        self.embedding = ScaleEmbedding(config)
        self.layers = nn.ModuleList(ScaleLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.final_norm = WidenedNorm(config)
        self.output = ScaleOutput(config)
        self.token_gate = None if config.gate_layer is None else ScaleGate(config)
        self.post_init()

    @property
    def _supports_sdpa(self) -> bool:
        return self.config.attention_softcap is None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScaleRotary):
            module.fill()

    def get_input_embeddings(self) -> nn.Module:
        """It gives `inputs_embeds`: both streams [B, S, D + U]."""
        return self.embedding

    def get_output_embeddings(self) -> None:
        """None: the output projection is two matrices, and a tied one is read from the embedding."""

    @torch.no_grad()
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Adds rows, such as padding: the mean of the others, or zeros. To the gate and the router they are new pieces.

        Raises:
            ValueError: fewer rows than there are.
        """
        count = self.config.vocab_size
        size = new_num_tokens or count
        size += -size % (pad_to_multiple_of or 1)
        if size < count:
            raise ValueError(f"resize_token_embeddings: expected at least the model's {count} rows, found {size}")
        if size == count:
            return self.embedding
        for owner, name in (
            *((part, "weight") for part in (self.embedding.base, self.embedding.expansion)),
            *((self.output, part) for part in ("base", "expansion")),
        ):
            rows = getattr(owner, name)
            row = rows.float().mean(0).to(rows.dtype) if mean_resizing else torch.zeros_like(rows[0])
            wider = torch.cat([rows, row.expand(size - count, -1)])
            setattr(owner, name, nn.Parameter(wider, requires_grad=rows.requires_grad))
        self.embedding.base.num_embeddings = self.embedding.expansion.num_embeddings = size
        self.config.base_vocab_size = self.config.base_vocab_size or count
        self.config.vocab_size = size
        self.output.set_vocabulary(self.config)
        self.tie_weights()
        return self.embedding

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The library's, whose paged cache has the same heads in every layer."""
        doubled = self.config.routed or self.config.gate_lower is not None
        reason = "some layers have two sets of heads" if doubled else self.config.why_not_packed()
        if reason is not None:
            raise ValueError(f"continuous batching cannot run this model: {reason}")
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]. Logits come for the last `logits_to_keep` tokens (0: all), or those.

        inputs_embeds: both streams [B, S, D + U], in place of input_ids; a gate judges each by its score. Hidden states
        are such streams of the adapted path: before each layer, and after the last norm.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds")
        embedded = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if (self.config.use_cache if use_cache is None else use_cache) and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        layers = range(self.config.num_hidden_layers)
        recorded: dict[int, Any] | None = dict.fromkeys(layers) if output_hidden_states else None
        paths, undecided = self.streams(
            embedded, attention_mask, position_ids, past_key_values, logits_to_keep, recorded, input_ids, **kwargs
        )
        logits = self.output(paths, undecided)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        states = None if recorded is None else tuple(torch.cat(path[:2], dim=-1) for path in recorded.values())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=states)

    def streams(
        self,
        embedded: Tensor,
        attention_mask: Any = None,  # noqa: ANN401
        position_ids: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401
        logits_to_keep: int | Tensor = 0,
        recorded: dict[int, Any] | None = None,
        tokens: Tensor | None = None,
        **options: Any,  # noqa: ANN401
    ) -> tuple[list[StreamPath], Tensor | None]:
        """What `output` reads: one path or two, after the last norm and the gate, and the undecided tokens [B, S, 1].

        Arguments: `forward`. `recorded` receives the streams before the layers that it names, and the last; `tokens`
        [B, S] are those embedded, if known.
        """
        config = self.config
        start = StreamPath(*embedded.split([config.hidden_size, config.expansion_hidden_size], dim=-1))
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + embedded.shape[1], device=embedded.device).unsqueeze(0)
        inputs = (tokens, attention_mask, position_ids, past_key_values)
        if tokens is not None and recorded is None and self._waits_for_open(attention_mask, past_key_values):
            paths, levels = self._from_open_on(start, tokens, *inputs[1:], options)
        else:
            paths, levels = self._run([start], inputs, options, recorded)
        if recorded is not None:
            recorded[config.num_hidden_layers] = paths[-1].normed(self.final_norm)
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        paths = [path._replace(x=path.x[:, kept], x_up=path.x_up[:, kept]).normed(self.final_norm) for path in paths]
        if levels is None:
            return paths, None
        # Zeros in x_up add exactly nothing to the logits. One path is both.
        preserved, adapted, levels = paths[0], paths[-1], levels[:, kept].to(paths[0].x.device)
        closed = levels == 0
        up = adapted.x_up.masked_fill(closed if adapted.rows is None else closed[adapted.rows], 0)
        chosen = StreamPath(torch.where(closed, preserved.x, adapted.x), up, rows=adapted.rows)
        return ([chosen], None) if config.gate_lower is None else ([preserved, chosen], levels == 1)

    def _run(
        self,
        paths: list[StreamPath],
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        recorded: dict[int, Any] | None = None,
        decided: Tensor | None = None,
    ) -> tuple[list[StreamPath], Tensor | None]:
        """The paths after the last layer, and the gate's decisions [B, S, 1] if there is one, or those `decided`.

        inputs: tokens, attention_mask, position_ids and past_key_values, as `forward` has them. Ends at the gate where
        no sequence had an expansion and each opens.
        """
        config = self.config
        _, attention_mask, position_ids, cache = inputs
        masks = attention_mask
        if not isinstance(masks, dict):  # a server's batches have their own
            masks = create_masks_for_generate(config, paths[0].x, attention_mask, cache, position_ids)
        tables = [make(position_ids, paths[0].x.dtype) for make in self.rotary]
        levels = None
        for index, layer in enumerate(self.layers):
            if recorded is not None and index in recorded:
                recorded[index] = paths[-1]
            if self.token_gate is not None and index == config.gate_layer:
                levels = self._levels(paths, *inputs) if decided is None else decided
                if (rows := paths[0].rows) is not None and len(rows) == 0 and (levels == 2).any(1).all():
                    return paths, levels
                if not config.routed:
                    of_rows = levels if rows is None else levels[rows]
                    shut = [of_rows < 2] if config.gate_lower is None else [of_rows < 2, of_rows == 0]
                    paths = [paths[0]._replace(masked=masked) for masked in shut]
            if config.routed and index == config.l_fp:
                paths = [paths[0]._replace(masked=True), paths[0]]
            rotary = config.layer_rotary[index]
            table = None if rotary is None else tables[rotary]
            streams = layer(
                *(stream for path in paths for stream in path[:2]),
                masked=[path.masked for path in paths],
                rows=paths[0].rows,
                rotary=table,
                mask=masks[config.layer_types[index]],
                past_key_values=cache,
                **options,
            )
            pairs = zip(paths, streams[::2], streams[1::2], strict=True)
            paths = [path._replace(x=x, x_up=x_up) for path, x, x_up in pairs]
        if self.token_gate is not None and levels is None:
            levels = self._levels(paths, *inputs) if decided is None else decided
        return paths, levels

    def _waits_for_open(self, attention_mask: Any, cache: Any) -> bool:  # noqa: ANN401
        """Whether sequences may do without the expansion until the gate opens: where their text can be run again."""
        config = self.config
        if (
            config.gate_layer is None
            or config.routed
            or config.gate_lower is not None
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or config._attn_implementation == "flex_attention"
            or len({part.base.weight.device for part in (self.embedding, self.final_norm)}) > 1
            or len(set(getattr(self, "hf_device_map", {}).values())) > 1
            or any(spec["context"] is not None for spec in config.rotary)
            or not (attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2))
        ):
            return False
        if cache is None:
            return True
        kinds = {type(layer) for layer in cache.layers}
        return (
            kinds <= {DynamicLayer, DynamicSlidingWindowLayer, GateCache, TextCache}
            and not cache.offloading
            and not any(getattr(layer, "record_past", False) for layer in cache.layers)
            and (TextCache in kinds or cache.get_seq_length() == 0)
        )

    def _from_open_on(
        self,
        start: StreamPath,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,  # noqa: ANN401
        options: dict[str, Any],
    ) -> tuple[list[StreamPath], Tensor | None]:
        """`_run` of the base alone, and of the expansion for sequences on which the gate has opened."""
        text = torch.stack([tokens, position_ids.expand_as(tokens)], dim=-1).unsqueeze(1)
        has_expansion = torch.zeros_like(text[..., :1])
        if cache is not None:
            text, has_expansion = TextCache.of(cache).update(text, has_expansion)
        before, path = has_expansion.any(2).flatten(), start
        if not before.all():
            rows = before.nonzero()[:, 0]
            path = start._replace(x_up=start.x_up[rows], rows=rows)
        [path], levels = self._run([path], (tokens, attention_mask, position_ids, cache), options)
        assert levels is not None, "`_waits_for_open` has seen a gate"
        after = before | (levels == 2).any(1).flatten()
        has_expansion[after, :, -1:] = 1
        if path.rows is None or not (after & ~before).any():
            return [path], levels
        opened, rows = (after & ~before).nonzero()[:, 0], after.nonzero()[:, 0]
        whole, whole_cache = self._from_the_start(opened, text, levels, attention_mask, cache, options)
        x, x_up = (stream[:, -tokens.shape[1] :] for stream in whole[:2])
        if len(opened) == len(tokens):
            if cache is not None:
                cache.layers[: len(self.layers)] = whole_cache.layers
            return [StreamPath(x, x_up)], levels
        if cache is not None:
            for layer, own in zip(cache.layers, whole_cache.layers, strict=False):
                layer.keys[opened], layer.values[opened] = own.keys, own.values
        x_up = start.x_up.index_copy(0, path.rows, path.x_up).index_copy(0, opened, x_up)
        x = path.x.index_copy(0, opened, x)
        return [StreamPath(x, x_up) if after.all() else StreamPath(x, x_up[rows], rows=rows)], levels

    def _from_the_start(
        self,
        rows: Tensor,
        text: Tensor,
        levels: Tensor,
        attention_mask: Tensor | None,
        cache: Any,  # noqa: ANN401
        options: dict[str, Any],
    ) -> tuple[StreamPath, Any]:
        """The whole text of some sequences with the expansion, all closed but the end, and a cache of it.

        text: tokens and positions [B, 1, T, 2]; levels [B, S, 1]: of its end.
        """
        tokens, positions = text[rows, 0].unbind(-1)
        widths = [self.config.hidden_size, self.config.expansion_hidden_size]
        start = StreamPath(*self.embedding(tokens).split(widths, dim=-1))
        own_cache = None if cache is None else DynamicCache(config=self.config)
        inputs = (tokens, None if attention_mask is None else attention_mask[rows], positions, own_cache)
        decided = F.pad(levels[rows], (0, 0, text.shape[2] - levels.shape[1], 0))
        [whole], _ = self._run([start], inputs, options, decided=decided)
        return whole, own_cache

    def _levels(
        self,
        paths: list[StreamPath],
        tokens: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,  # noqa: ANN401
    ) -> Tensor:
        """The gate's decisions [B, S, 1], on the path that no expansion_to_base block has changed."""
        if self.token_gate is None:
            raise ValueError("the model has no gate")
        x = paths[0].x
        is_text, documents = texts_of(x, attention_mask, position_ids, cache)
        levels: Tensor = self.token_gate(x, is_text, documents, cache)
        if is_text is not None:
            levels = levels.masked_fill(~is_text.unsqueeze(-1).to(levels.device), 0)
        if tokens is not None and self.output.only_base_after_closed:
            levels = levels.masked_fill((tokens >= self.output.of_base).unsqueeze(-1).to(levels.device), 2)
        return levels

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,  # noqa: ANN401
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """A text that outgrows a context with other frequencies beyond it (longrope) is computed from its start."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        contexts = [spec["context"] for spec in self.config.rotary if spec["long_frequencies"] is not None]
        if any(0 < seen <= context < input_ids.shape[1] for context in contexts):
            past_key_values = kwargs["next_sequence_length"] = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:  # noqa: ANN401
        """The padding itself, which the gate reads too: `forward` makes the masks."""
        return attention_mask
