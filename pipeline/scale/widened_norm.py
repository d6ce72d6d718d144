"""The norms of the two streams, and of the added heads' queries and keys.

The paper leaves open which statistics normalise the expansion stream; `WidenedNorm` has both
answers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from pipeline.open_tokens import ALL_OPEN, OpenTokens
from pipeline.parallel.layers import PLAIN_GAIN, Gain, LayerNorm, NormedChannels, NormKind, RMSNorm
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.widened_linear import Streams
from pipeline.scale_math import sum_of_squares


class WidenedNorm(nn.Module):
    """x: [..., D], x_up: [..., U] -> the same shapes, normalised.

    Each stream has its own gains (and biases). The base stream is normalised by its own statistics
    only, otherwise it would not be preserved.

    Attributes:
        statistics: what normalises the expansion stream, which the paper leaves open. `separate`:
            its own statistics. `base`: the base stream's, so that a trained model can be exported
            as an ordinary wider one.
        stored_scale: the scale of added channels in a merged export, if the norm is to count them
            as there (`as_stored`).
        normed: how the base's statistics count its channels, where the base was widened before.
        own: a difference of the base's gain (and bias) for open tokens alone; None without.
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
        gain: Gain = PLAIN_GAIN,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.normed = normed
        norm: Any = partial(LayerNorm, eps=eps, tp=tp)
        if kind == "rmsnorm":
            norm = partial(RMSNorm, eps=eps, tp=tp, gain=gain)
        self.base = norm(size)
        self.expansion: nn.Module | None = None
        if expansion_size is not None:
            self.expansion = norm(expansion_size)
        self.stored_scale: float | None = None
        self.own: RMSNorm | LayerNorm | None = None

    def as_stored(self, scale: float) -> None:
        """From now on computes as a merged export does: as one norm over both streams.

        A merged export stores the added channels times `scale`.
        """
        self.stored_scale = scale
        if self.normed is not None:
            self.normed = NormedChannels(self.normed.size, scale)

    def forward(
        self, x: Tensor, x_up: Tensor | None, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        """`own` is for open tokens; the y of others is the base's, to the bit."""
        if isinstance(self.base, LayerNorm):
            return self._layer_norm(x, x_up, open_tokens)
        if self.stored_scale is not None and x_up is not None:
            return self._merged_norm(x, x_up, self.stored_scale, open_tokens)

        width = x.shape[-1]
        # One copy in fp32 for the norm and for the mean square: both would be kept for backward.
        x_fp32 = x.float()
        mean_square: Tensor | None = None
        if self.normed is not None:
            # The divisor is the whole width, as the base's own RMSNorm had it when it was trained.
            mean_square = self.normed.sum_of_squares(x_fp32) / width
        y = self._base_part(x, self.base.normalised(x_fp32, mean_square), open_tokens)
        if self.expansion is None or x_up is None:
            return y, None
        if self.statistics == "separate":
            return y, self.expansion(x_up)
        if mean_square is None:
            mean_square = sum_of_squares(x_fp32) / width
        return y, self.expansion(x_up, mean_square)

    def _base_part(self, x: Tensor, normal: Tensor | None, open_tokens: OpenTokens) -> Tensor:
        """The norm of the base stream; `normal` is x normalised, without a gain (RMSNorm only)."""
        y: Tensor = self.base(x) if normal is None else self.base(x, normal=normal)
        if self.own is None:
            return y
        if normal is None:
            return open_tokens.add(y, self.own, x)
        # Both gains multiply one normalised x.
        return open_tokens.add(y, partial(self.own, normal=normal), x)

    def _layer_norm(self, x: Tensor, x_up: Tensor | None, open_tokens: OpenTokens) -> Streams:
        """`forward` with LayerNorm, which also subtracts a mean."""
        y = self._base_part(x, None, open_tokens)
        if self.expansion is None or x_up is None:
            return y, None
        statistics_of = x if self.statistics == "base" else None
        return y, self.expansion(x_up, statistics_of)

    def _merged_norm(
        self, x: Tensor, x_up: Tensor, scale: float, open_tokens: OpenTokens
    ) -> Streams:
        """`forward` as a merged export computes it: one mean square over both streams."""
        assert self.expansion is not None, "x_up has a norm"
        x_fp32 = x.float()
        mean_square = self._merged_mean_square(x_fp32, x_up, scale)
        y = self._base_part(x, self.base.normalised(x_fp32, mean_square), open_tokens)
        return y, self.expansion(x_up, mean_square)

    def _merged_mean_square(self, x_fp32: Tensor, x_up: Tensor, scale: float) -> Tensor:
        """The mean square [..., 1] of a merged export's norm, which counts the added channels as
        the export stores them, times `scale`. The divisor is the base's width."""
        width = x_fp32.shape[-1]
        normed = NormedChannels(width, 1.0) if self.normed is None else self.normed
        # Two sums, added: the one norm of the export sums over one longer row, in another order,
        # and may differ in the last bits (docs/adr/0007-how-far-an-export-may-be-off.md).
        of_x = normed.sum_of_squares(x_fp32)
        return (of_x + scale**2 * sum_of_squares(x_up)) / width


class WidenedHeadNorm(nn.Module):
    """The RMSNorm of queries or keys: [..., H·K] and [..., H_up·K] -> the same shapes.

    Every `size` channels, a head or all heads, are normalised by their own statistics, so that the
    base's heads do not depend on the added ones. The added heads have gains of their own
    (`expansion_size` channels). With None they have the base's: an ordinary wider model has one
    gain for all its heads. `own` is as in `WidenedNorm`, of the base's heads.
    """

    def __init__(
        self,
        size: int,
        expansion_size: int | None,
        *,
        eps: float,
        gain: Gain,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, eps=eps, tp=tp, gain=gain, in_region=True)
        self.base = norm(size)
        self.expansion: RMSNorm | None = None
        if expansion_size is not None:
            self.expansion = norm(expansion_size)
        self.own: RMSNorm | None = None

    def forward(
        self, heads: Tensor, heads_up: Tensor | None, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        """`open_tokens` as in `WidenedNorm`."""
        normed = self._normed(self.base, heads)
        if self.own is not None:
            normed = open_tokens.add(normed, partial(self._normed, self.own), heads)
        if heads_up is None:
            return normed, None
        added_norm = self.base if self.expansion is None else self.expansion
        return normed, self._normed(added_norm, heads_up)

    @staticmethod
    def _normed(norm: RMSNorm, flat: Tensor) -> Tensor:
        # Not by the weight's shape: ZeRO-3 has gathered it in the norm's own forward pass only.
        normed: Tensor = norm(flat.unflatten(-1, (-1, norm.size)))
        return normed.flatten(-2)
