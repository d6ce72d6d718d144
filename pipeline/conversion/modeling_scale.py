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
without those blocks, and an open one the other.

Shapes: B batch, S sequence, D hidden, U expansion, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.versions import require_version

NEEDED = "5.0.0"
"""The oldest transformers that runs this file; an older one would fail at one of the imports below."""
require_version(f"transformers>={NEEDED}", "This model's code needs it: pip install -U transformers")

from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.cache_utils import DynamicLayer  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402


class ScaleConfig(PretrainedConfig):  # type: ignore[misc]
    """The base's sizes under their usual names, and what was added to each as `expansion_…`."""

    model_type = "scale"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 172
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
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
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_statistics: str = "separate"
    normed_size: int | None = None
    hidden_act: str = "silu"
    gated_ffn: bool = True
    query_key_value_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    parallel_residual: bool = False
    rotary: dict[str, Any] | None = None
    gate_layer: int | None = None
    gate_features: str = "token"
    gate_decay: float = 0.8
    gate_bias: float = 0.0
    gate_threshold: float = 0.0
    use_cache: bool = True

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        # transformers before and after configurations became dataclasses: both take this.
        for name in ScaleConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(ScaleConfig, name)))
        super().__init__(**kwargs)

    def is_collaborative(self, layer: int, module: str) -> bool:
        """Whether `module` of `layer` has expansion_to_base blocks."""
        return layer >= self.l_fp and module in self.collaborative_modules


class StreamPath(NamedTuple):
    """The streams x [B, S, D] and x_up [B, S, U] of one path.

    `masked` leaves every expansion_to_base out, as a mask [B, S, 1] for some of the tokens.
    """

    x: Tensor
    x_up: Tensor
    masked: bool | Tensor = False

    def plus(self, y: Tensor, y_up: Tensor) -> StreamPath:
        return StreamPath(self.x + y, self.x_up + y_up, self.masked)


class WidenedLinear(nn.Module):
    """x [..., in], x_up [..., in_up] -> y [..., out], y_up [..., out_up]. Sizes are (base, expansion) pairs."""

    def __init__(self, sizes_in: tuple[int, int], sizes_out: tuple[int, int], bias: bool, collaborative: bool) -> None:
        super().__init__()
        (size_in, up_in), (size_out, up_out) = sizes_in, sizes_out
        self.base = nn.Linear(size_in, size_out, bias=bias)
        self.expansion_to_base = nn.Linear(up_in, size_out, bias=False) if collaborative else None
        self.base_to_expansion = nn.Linear(size_in, up_out, bias=bias)
        self.expansion_to_expansion = nn.Linear(up_in, up_out, bias=False)

    def forward(self, x: Tensor, x_up: Tensor, masked: bool | Tensor) -> tuple[Tensor, Tensor]:
        y = self.base(x)
        if self.expansion_to_base is not None and masked is not True:
            widened = y + self.expansion_to_base(x_up)
            y = torch.where(masked, y, widened) if isinstance(masked, Tensor) else widened
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


class StreamNorm(nn.Module):
    """RMSNorm or LayerNorm of one stream [..., size], in fp32; its statistics may be those of the other stream.

    With `normed_size` (RMSNorm only) they are summed over the first channels, and the others count as zeros.
    """

    def __init__(self, kind: str, size: int, eps: float, normed_size: int | None) -> None:
        super().__init__()
        self.eps = eps
        self.normed_size = normed_size
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layernorm" else None

    def forward(self, x: Tensor, statistics_of: Tensor) -> Tensor:
        source = statistics_of.float()
        if self.bias is None:
            squares = source[..., : self.normed_size].pow(2)
            scale = torch.rsqrt(squares.sum(-1, keepdim=True) / source.shape[-1] + self.eps)
            return self.weight * (x.float() * scale).to(x.dtype)
        variance, mean = torch.var_mean(source, dim=-1, keepdim=True, correction=0)
        normal = (x.float() - mean) * torch.rsqrt(variance + self.eps)
        return self.weight * normal.to(x.dtype) + self.bias


class WidenedNorm(nn.Module):
    """Both streams normalised: the base by its own statistics, the expansion by its own or by the base's."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.shared = config.norm_statistics == "base"
        of_base = config.normed_size if self.shared else None
        self.base = StreamNorm(config.norm, config.hidden_size, config.norm_eps, config.normed_size)
        self.expansion = StreamNorm(config.norm, config.expansion_hidden_size, config.norm_eps, of_base)

    def forward(self, path: StreamPath) -> StreamPath:
        x, x_up, masked = path
        return StreamPath(self.base(x, x), self.expansion(x_up, x if self.shared else x_up), masked)


class Rotary(NamedTuple):
    """Rotary position embedding: cos and sin [B, 1, S, R]; the first R features of each head are rotated.

    A tuple, so that `device_map` moves it to the device of each layer.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: ScaleConfig, dtype: torch.dtype) -> Rotary:
        """For positions [B, S]."""
        angles = positions.float().unsqueeze(-1) * cls._frequencies(config).to(positions.device)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    @staticmethod
    def _frequencies(config: ScaleConfig) -> Tensor:
        rotary = config.rotary or {"theta": 10000.0}
        rotated = int(config.head_dim * rotary.get("fraction", 1.0))
        frequencies = 1.0 / rotary["theta"] ** (torch.arange(0, rotated, 2, device="cpu").float() / rotated)
        scaling = rotary.get("scaling", "default")
        if scaling == "linear":
            return frequencies / rotary["factor"]
        if scaling == "llama3":  # long wavelengths are stretched, short ones kept, those between blended
            low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
            turns = rotary["original_max_position_embeddings"] / (2 * math.pi / frequencies)
            blend = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - blend) * frequencies / rotary["factor"] + blend * frequencies
        return frequencies

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, H, S, K]."""
        width = self.cos.shape[-1]
        rotated, rest = heads[..., :width], heads[..., width:]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([rotated, rest], dim=-1)


class ScaleAttention(nn.Module):
    """Causal attention. The expansion's heads follow the base's; each path has its own set of all heads."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        hidden = (config.hidden_size, config.expansion_hidden_size)
        heads = self._sizes(config.num_attention_heads, config.expansion_num_attention_heads)
        kv_heads = self._sizes(config.num_key_value_heads, config.expansion_num_key_value_heads)
        bias, collaborative = config.query_key_value_bias, config.is_collaborative(layer, "attention")
        self.base_width = heads[0]
        self.query = WidenedLinear(hidden, heads, bias, collaborative)
        self.key = WidenedLinear(hidden, kv_heads, bias, collaborative)
        self.value = WidenedLinear(hidden, kv_heads, bias, collaborative)
        self.output = WidenedLinear(heads, hidden, config.output_bias, collaborative)

    def _sizes(self, heads: int, expansion_heads: int) -> tuple[int, int]:
        return heads * self.head_dim, expansion_heads * self.head_dim

    def forward(
        self,
        paths: list[StreamPath],
        rotary: Rotary,
        mask: Tensor | None,
        cache: Any,  # noqa: ANN401
    ) -> list[tuple[Tensor, Tensor]]:
        query = rotary.rotate(self._heads(self.query, paths))
        key = rotary.rotate(self._heads(self.key, paths))
        value = self._heads(self.value, paths)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        causal = mask is None and query.shape[2] > 1
        grouped = query.shape[1] != key.shape[1]
        heads = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)
        attended = heads.transpose(1, 2).flatten(2).chunk(len(paths), dim=-1)
        return [
            self.output(flat[..., : self.base_width], flat[..., self.base_width :], path.masked)
            for flat, path in zip(attended, paths, strict=True)
        ]

    def _heads(self, projection: WidenedLinear, paths: list[StreamPath]) -> Tensor:
        """[B, H, S, K]: the heads of all paths, in the order that keeps query heads with their key/value head."""
        flat = torch.cat([part for path in paths for part in projection(*path)], dim=-1)
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
        fed: tuple[Tensor, Tensor] = self.down(inner, inner_up, path.masked)
        return fed


class ScaleLayer(nn.Module):
    """One decoder layer, with sequential or parallel residual, on one path or on the router's two."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.attention_norm = WidenedNorm(config)
        self.attention = ScaleAttention(config, layer)
        self.ffn_norm = WidenedNorm(config)
        self.ffn = ScaleFeedForward(config, layer)

    def forward(self, paths: list[StreamPath], rotary: Rotary, mask: Tensor | None, cache: Any) -> list[StreamPath]:  # noqa: ANN401
        attended = self.attention([self.attention_norm(path) for path in paths], rotary, mask, cache)
        summed = [path.plus(*change) for path, change in zip(paths, attended, strict=True)]
        fed = [self.ffn(self.ffn_norm(path)) for path in (paths if self.parallel_residual else summed)]
        return [path.plus(*change) for path, change in zip(summed, fed, strict=True)]


class ScaleEmbedding(nn.Module):
    """The base's token embedding, and the added columns, from which the expansion stream starts."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.base = nn.Embedding(config.vocab_size, config.hidden_size)
        self.expansion = nn.Embedding(config.vocab_size, config.expansion_hidden_size)

    def forward(self, tokens: Tensor) -> StreamPath:
        return StreamPath(self.base(tokens), self.expansion(tokens))


class ScaleGate(nn.Module):
    """Decides which tokens stay closed, by a linear score of the base's stream x [B, S, D] before `gate_layer`.

    Read are x over its root mean square, standardised, and with `token+running_mean` also its mean over the text so
    far, in which each token counts less by `gate_decay` with every token after it. All is computed in fp32.
    """

    WINDOW_DOUBLINGS = 7  # the mean reads 2 ** 7 tokens; what it leaves out is below the resolution of fp32

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.cache_layer = config.num_hidden_layers
        self.decay, self.bias, self.threshold = config.gate_decay, config.gate_bias, config.gate_threshold
        self.has_mean = config.gate_features == "token+running_mean"
        size = config.hidden_size * (2 if self.has_mean else 1)
        self.mean = nn.Parameter(torch.zeros(size))
        self.std = nn.Parameter(torch.ones(size))
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: Any) -> Tensor:  # noqa: ANN401
        """The closed tokens, bool [B, S, 1]. What the running mean needs is cached.

        is_text: bool [B, S], false for padding; documents: [B, S], equal numbers where the mean may read. None: all.
        """
        features = x.float()
        features = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-12)
        if self.has_mean:
            features = torch.cat([features, self._running_mean(features, is_text, documents, cache)], dim=-1)
        score = ((features - self.mean.float()) / self.std.float() * self.weight.float()).sum(-1, keepdim=True)
        return score + self.bias <= self.threshold

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
            # One layer more in the cache, so that it is reordered and cropped with the others.
            if len(cache.layers) == self.cache_layer:
                cache.layers.append(DynamicLayer())
            kept = cache.update(values.unsqueeze(1), counts.unsqueeze(1), self.cache_layer)
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
    """logits = base x + expansion x_up, or the router's choice of two paths. A tied base is the embedding's own."""

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.threshold = config.router_threshold
        tied = config.tie_word_embeddings
        self.base = None if tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.expansion = nn.Parameter(torch.empty(config.vocab_size, config.expansion_hidden_size))

    def forward(self, paths: list[StreamPath], embedding: Tensor) -> Tensor:
        """Logits [B, S, V] in fp32. The last path is the adapted one; if there are two, the first is the preserved."""
        base = embedding if self.base is None else self.base
        z, x_up = F.linear(paths[-1].x, base).float(), paths[-1].x_up
        if len(paths) == 2:
            z_p = F.linear(paths[0].x, base).float()
            preserved = (z_p * z).sum(-1, keepdim=True) > self.threshold * (
                z_p.square().sum(-1, keepdim=True) * z.square().sum(-1, keepdim=True)
            ).sqrt()
            z = torch.where(preserved, (z_p + z) / 2, z)
            x_up = torch.where(preserved, paths[0].x_up, x_up)
        return z + F.linear(x_up, self.expansion)


class ScaleForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder-only language model widened by SCALE."""

    config_class = ScaleConfig
    base_model_prefix = ""
    _no_split_modules = ("ScaleLayer",)
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ("token_gate",)

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__(config)
        self.embedding = ScaleEmbedding(config)
        self.layers = nn.ModuleList(ScaleLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.final_norm = WidenedNorm(config)
        self.output = ScaleOutput(config)
        self.token_gate = None if config.gate_layer is None else ScaleGate(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.base

    def get_output_embeddings(self) -> None:
        """None: the output projection is two matrices, and a tied one is read from the embedding."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,  # noqa: ANN401
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]. Logits come for the last `logits_to_keep` tokens (0: all)."""
        if (self.config.use_cache if use_cache is None else use_cache) and past_key_values is None:
            past_key_values = DynamicCache()
        streams = self.embedding(input_ids)
        if position_ids is None:
            position_ids = self._positions(input_ids, attention_mask, past_key_values)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=streams.x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        rotary = Rotary.at(position_ids, self.config, streams.x.dtype)
        paths, closed = [streams], None
        for index, layer in enumerate(self.layers):
            if self.token_gate is not None and index == self.config.gate_layer:
                closed = self._closed(paths, attention_mask, position_ids, past_key_values)
                if not self.config.routed:
                    paths = [paths[0]._replace(masked=closed)]
            if self.config.routed and index == self.config.l_fp:
                paths = [paths[0]._replace(masked=True), paths[0]]
            paths = layer(paths, rotary, mask, past_key_values)
        if self.token_gate is not None and closed is None:
            closed = self._closed(paths, attention_mask, position_ids, past_key_values)
        kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        paths = [self.final_norm(StreamPath(path.x[:, kept], path.x_up[:, kept])) for path in paths]
        if closed is not None:
            # Zeros in x_up add exactly nothing to the logits. Without a router both are the same path.
            preserved, adapted, shut = paths[0], paths[-1], closed[:, kept].to(paths[0].x.device)
            paths = [
                StreamPath(torch.where(shut, preserved.x, adapted.x), adapted.x_up.masked_fill(shut, 0)),
            ]
        logits = self.output(paths, self.embedding.base.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _closed(
        self,
        paths: list[StreamPath],
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,  # noqa: ANN401
    ) -> Tensor:
        """The gate's decisions [B, S, 1], on the path that no expansion_to_base block has changed."""
        if self.token_gate is None:
            raise ValueError("the model has no gate")
        x, is_text, documents = paths[0].x, None, None
        if attention_mask is None and cache is None:
            # As for attention (`create_causal_mask`): positions that begin again are another text in the same row.
            breaks = position_ids.expand(x.shape[:2]).diff(dim=1) != 1
            documents = F.pad(breaks.cumsum(dim=1), (1, 0))
        if attention_mask is not None and attention_mask.dim() == 2:
            is_text = attention_mask[:, -x.shape[1] :].bool()
        closed: Tensor = self.token_gate(x, is_text, documents, cache)
        return closed

    @staticmethod
    def _positions(input_ids: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:  # noqa: ANN401
        """Positions count from the first token that is not padding."""
        length = input_ids.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        seen = 0 if cache is None else cache.get_seq_length()
        return torch.arange(seen, seen + length, device=input_ids.device).unsqueeze(0)
