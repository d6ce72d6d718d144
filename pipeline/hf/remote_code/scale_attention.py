"""Rotary position embedding, and attention over the heads of both streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward  # it caps scores

from .configuration_scale import ScaleConfig
from .scale_streams import StreamPath, WidenedHeadNorm, WidenedLinear


class Rotary(NamedTuple):
    """Rotary position embedding: cos and sin [B, 1, S, R]; the first R features of each head are rotated.

    A tuple, so that `device_map` moves it to the device of each layer.
    """

    cos: Tensor
    sin: Tensor

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
            held.copy_(
                torch.tensor(self.spec[name], dtype=torch.float32, device="cpu").view(torch.int32)
            )

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """For positions [B, S]."""
        spec, device = self.spec, positions.device
        frequencies: Any
        longer: Any
        frequencies, longer = (
            None if bits is None else bits.view(torch.float32).to(device)
            for bits in (getattr(self, name) for name in self.NUMBERS)
        )
        if spec["context"] is not None:
            length = positions.amax(-1)[:, None, None] + 1
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
        self.scaling = (
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        )
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.sliding_window = (
            config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        )
        hidden = (config.hidden_size, config.expansion_hidden_size)
        heads = self._sizes(config.num_attention_heads, config.expansion_num_attention_heads)
        kv_heads = self._sizes(config.num_key_value_heads, config.expansion_num_key_value_heads)
        bias, collaborative = (
            config.query_key_value_bias,
            config.is_collaborative(layer, "attention"),
        )
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
        mask: Any,
        cache: Any,
        options: dict[str, Any],
    ) -> list[tuple[Tensor, Tensor]]:
        query = self._heads(self.query, self.query_norm, paths)
        key = self._heads(self.key, self.key_norm, paths)
        value = self._heads(self.value, None, paths)
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended = self._attend(query, key, value, mask, options).chunk(len(paths), dim=-1)
        heads = (flat.tensor_split([self.base_width], dim=-1) for flat in attended)
        return [
            self.output(base, up if len(path.x_up) else path.x_up, path.masked)
            for (base, up), path in zip(heads, paths, strict=True)
        ]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Heads [B, H, S, K] -> [B, S, H K]."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if self.sliding_window is not None:
            options = {**options, "sliding_window": self.sliding_window}
        if self.config.attention_softcap is not None:
            options = {**options, "softcap": self.config.attention_softcap}
        heads, _ = attend(
            self, query, key, value, mask, scaling=self.scaling, dropout=0.0, **options
        )
        flat: Tensor = heads.flatten(2)
        return flat

    def _heads(
        self, projection: WidenedLinear, norm: WidenedHeadNorm | None, paths: list[StreamPath]
    ) -> Tensor:
        """[B, H, S, K]: the heads of all paths, in the order that keeps query heads with their key/value head."""
        projected = [projection(*path) for path in paths]
        parts = [
            part
            for pair in projected
            for part in (pair if norm is None else norm(*pair))
            if len(part)
        ]
        return torch.cat(parts, dim=-1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
