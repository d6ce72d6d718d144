"""The norms of the two streams, and of the added heads' queries and keys.

The paper leaves open which statistics normalise the expansion stream; `WidenedNorm` has both answers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from pipeline.parallel.norms import LayerNorm, NormedChannels, NormKind, RMSNorm
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.widened_linear import Streams
from pipeline.scale_math import sum_of_squares


class WidenedNorm(nn.Module):
    """x: [..., D], x_up: [..., U] -> the same shapes, normalised; each stream has its own gains (and biases).

    The base stream is normalised by its own statistics only, otherwise it would not be preserved. The paper does not
    specify which `statistics` normalise the expansion stream: `separate` are its own; `base` are those of the base
    stream, so that a trained model can be exported as an ordinary wider one. `normed`: how those count its channels.
    """

    def __init__(
        self,
        kind: NormKind,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        statistics: Literal["separate", "base"] = "separate",
        normed: NormedChannels | None = None,
        gain_offset: bool = False,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.normed = normed
        norm: Any = partial(LayerNorm, eps=eps, tp=tp)
        if kind == "rmsnorm":
            norm = partial(RMSNorm, eps=eps, tp=tp, gain_offset=gain_offset)
        self.base = norm(size)
        self.expansion = None if expansion_size is None else norm(expansion_size)
        self._stored_scale: float | None = None

    def as_stored(self, scale: float) -> None:
        """From now on computes as an ordinary norm over both streams, where added channels are stored times `scale`."""
        self._stored_scale = scale
        if self.normed is not None:
            self.normed = NormedChannels(self.normed.size, scale)

    def forward(self, x: Tensor, x_up: Tensor | None) -> Streams:
        if isinstance(self.base, LayerNorm):
            of_base = x if self.statistics == "base" else None
            return self.base(x), None if self.expansion is None or x_up is None else self.expansion(
                x_up, of_base
            )
        x_fp32, width = x.float(), x.shape[-1]
        mean_square = None if self.normed is None else self.normed.sum_of_squares(x_fp32) / width
        if self.expansion is None or x_up is None:
            return self.base(x, mean_square, x_fp32=x_fp32), None
        if self._stored_scale is not None:
            added = self._stored_scale**2 * sum_of_squares(x_up)
            mean_square = (
                (self.normed or NormedChannels(width, 1.0)).sum_of_squares(x_fp32) + added
            ) / width
            return self.base(x, mean_square, x_fp32=x_fp32), self.expansion(x_up, mean_square)
        y = self.base(x, mean_square, x_fp32=x_fp32)
        if self.statistics == "separate":
            return y, self.expansion(x_up)
        if mean_square is None:
            mean_square = sum_of_squares(x_fp32) / width
        return y, self.expansion(x_up, mean_square)


class WidenedHeadNorm(nn.Module):
    """The RMSNorm of queries or keys: [..., H·K] and [..., H_up·K] -> the same shapes.

    Every `size` channels, a head or all heads, are normalised by their own statistics, so what the added heads do
    leaves the base's alone. The added heads have gains of their own (`expansion_size` channels), or with None those of
    the base: an ordinary wider model has one gain for all its heads.
    """

    def __init__(
        self,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        gain_offset: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, eps=eps, tp=tp, gain_offset=gain_offset, in_region=True)
        self.base = norm(size)
        self.expansion = None if expansion_size is None else norm(expansion_size)

    def forward(self, heads: Tensor, heads_up: Tensor | None) -> Streams:
        up = self.base if self.expansion is None else self.expansion
        return self._normed(self.base, heads), None if heads_up is None else self._normed(
            up, heads_up
        )

    @staticmethod
    def _normed(norm: RMSNorm, flat: Tensor) -> Tensor:
        # Not by the weight's shape: ZeRO-3 has gathered it in the norm's own forward pass only.
        normed: Tensor = norm(flat.unflatten(-1, (-1, norm.size)))
        return normed.flatten(-2)
