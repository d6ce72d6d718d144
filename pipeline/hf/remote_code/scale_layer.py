"""One decoder layer on both streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_scale import ScaleConfig
from .scale_attention import Rotary, ScaleAttention
from .scale_feed_forward import ScaleFeedForward, ScaleMixture
from .scale_streams import StreamPath, WidenedNorm


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
        self.ffn = (ScaleMixture if layer in config.expert_layers else ScaleFeedForward)(
            config, layer
        )
        self.ffn_post_norm = WidenedNorm(config) if after else None

    def forward(
        self,
        *streams: Tensor,
        masked: list[bool | Tensor],
        rotary: Rotary | None,
        mask: Any,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """x and x_up of each path -> the same: a reentrant checkpoint sees tensors among the arguments only.

        `options` are for the attention function, such as a server's own cache.
        """
        paths = [
            StreamPath(*pair) for pair in zip(streams[::2], streams[1::2], masked, strict=True)
        ]
        read = [path.normed(self.attention_norm) for path in paths]
        attended = self.attention(read, rotary, mask, past_key_values, options)
        summed = self._sums(paths, attended, self.attention_post_norm)
        fed = [
            self.ffn(path.normed(self.ffn_norm))
            for path in (paths if self.parallel_residual else summed)
        ]
        return tuple(
            stream for path in self._sums(summed, fed, self.ffn_post_norm) for stream in path[:2]
        )

    @staticmethod
    def _sums(
        paths: list[StreamPath], changes: list[tuple[Tensor, Tensor]], norm: WidenedNorm | None
    ) -> list[StreamPath]:
        pairs = zip(paths, (StreamPath(*change).normed(norm) for change in changes), strict=True)
        return [
            path._replace(x=path.x + change.x, x_up=path.x_up + change.x_up)
            for path, change in pairs
        ]
