"""What a base decoder looks like, in one frozen record that no library's configuration class leaks into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pipeline.errors import LayoutError
from pipeline.scale.layers import NormKind
from pipeline.scale.plan import Widths

# --- The residual stream of a base that was widened before, as an ordinary model's folder stores it -----------------
# Such a folder (`conversion.stock`) holds what an earlier expansion added to the residual stream times a small power of
# two, so that an ordinary RMSNorm does not feel it. That is well for running it and ruinous for training it: AdamW's
# steps are as long for a weight of 10⁻⁸ as for one of 10⁻². So the weights are read at their own size, which a power of
# two gives back exactly, and the norms leave those channels out of their mean square, which is what the scale was for.

# 2^-20 leaves 2^-40 of their square in the mean square. Half precision has five bits of exponent: there 2^-6, which
# keeps the scaled weights normal numbers and the error below its own rounding.
_SCALE_EXPONENT = {torch.float32: 20, torch.bfloat16: 20, torch.float16: 6}
_WRITTEN_TO = (
    "attention.output.base.weight",
    "attention.output.base.bias",
    "ffn.down.base.weight",
    "ffn.down.base.bias",
)


def scale_in(dtype: torch.dtype) -> float:
    """What a folder of `dtype` stores the added channels times."""
    return 2.0 ** -_SCALE_EXPONENT[dtype]


@dataclass(frozen=True)
class StoredResidual:
    """The channels from `normed_size` on are stored times `scale`, a power of two, and count in no norm."""

    normed_size: int
    scale: float

    def store(self, name: str, values: Tensor) -> Tensor:
        """The base parameter `name` (ours) as the folder holds it; changes `values`."""
        return self._times(name, values, self.scale, first_row=0)

    def restore(self, name: str, stored: Tensor, first_row: int = 0) -> Tensor:
        """The inverse, for the rows from `first_row` on; changes `stored`."""
        return self._times(name, stored, 1 / self.scale, first_row)

    def _times(self, name: str, values: Tensor, factor: float, first_row: int) -> Tensor:
        if name == "embedding.base.weight":
            values[:, self.normed_size :] *= factor
        elif name.endswith(_WRITTEN_TO):
            values[max(0, self.normed_size - first_row) :] *= factor
        elif name.endswith("norm.base.weight"):  # a gain takes back what the stream was scaled by
            values[max(0, self.normed_size - first_row) :] /= factor
        return values


# --- What a base decoder looks like, in one frozen record that no ---


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding: `fraction` of each head is rotated. `llama3` is Llama-3's frequency scaling."""

    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder's architecture. Sizes carry Hugging Face's names."""

    family: Literal["llama", "gpt_neox"]
    vocab_size: int
    num_layers: int
    widths: Widths
    head_dim: int
    norm: NormKind
    norm_eps: float
    activation: str
    max_position_embeddings: int
    gated_ffn: bool = True
    query_key_value_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    parallel_residual: bool = False
    tie_word_embeddings: bool = False
    rotary: RotarySpec = field(default_factory=RotarySpec)
    residual: StoredResidual | None = None
    """of a base that was widened before"""

    @property
    def normed_size(self) -> int | None:
        """How many channels of the residual stream the norms take their statistics from; None: all."""
        return None if self.residual is None else self.residual.normed_size


def check_base_fits(widths: Widths, tp_size: int) -> None:
    """Raises LayoutError where a base of these widths cannot lie on `tp_size` ranks; names the sizes that can.

    Query heads and the FFN's inner width divide by `tp_size`; key/value heads do, or several ranks hold the same one.
    """

    def fits(size: int) -> bool:
        kv_heads = widths.num_key_value_heads
        divides = widths.num_attention_heads % size == 0 and widths.intermediate_size % size == 0
        return divides and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(tp_size):
        sizes = [size for size in range(1, widths.num_attention_heads + 1) if fits(size)]
        raise LayoutError(
            f"parallel.tp_size: the base's {widths.num_attention_heads} query heads, {widths.num_key_value_heads} "
            f"key/value heads and intermediate_size {widths.intermediate_size} do not divide over {tp_size} ranks; "
            f"sizes that fit: {', '.join(map(str, sizes))}"
        )
