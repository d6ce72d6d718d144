"""The architecture of a base decoder, independent of any library's configuration class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pipeline.errors import LayoutError
from pipeline.scale.layers import NormKind
from pipeline.scale.plan import Widths


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
    """A decoder's architecture, with Hugging Face's names.

    `residual` is set for a base that was widened before. `new_rows` are those of an extended vocabulary; their
    ids follow the `vocab_size` of the base.
    """

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
    new_rows: int = 0

    @property
    def normed_size(self) -> int | None:
        """How many channels of the residual stream the norms' statistics are computed from; None: all."""
        return None if self.residual is None else self.residual.normed_size


def check_base_fits(widths: Widths, tp_size: int) -> None:
    """Raises LayoutError where a base of these widths cannot be split over `tp_size` ranks; names the sizes that fit.

    `tp_size` must divide the query heads and the FFN's inner width, and divide the key/value heads or be a multiple.
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


# With 2^-20, 2^-40 of the added channels' squares remain in the mean square. Half precision has five exponent bits: its
# 2^-6 keeps the scaled weights normal numbers, and the error below the rounding error.
_SCALE_EXPONENT = {torch.float32: 20, torch.bfloat16: 20, torch.float16: 6}
_WRITTEN_TO = (
    "attention.output.base.weight",
    "attention.output.base.bias",
    "ffn.down.base.weight",
    "ffn.down.base.bias",
)


def scale_in(dtype: torch.dtype) -> float:
    """The scale of the added channels in a folder of `dtype`."""
    return 2.0 ** -_SCALE_EXPONENT[dtype]


@dataclass(frozen=True)
class StoredResidual:
    """How a stock export of a widened model (`conversion.stock`) stores its residual stream.

    The channels from `normed_size` on, which an earlier expansion added, are stored times `scale`, a power of two, so
    that an ordinary RMSNorm hardly counts them. AdamW cannot train them at that scale: its steps are as large for a
    weight of 10⁻⁸ as for one of 10⁻². So reading undoes the scale, which is exact for a power of two, and the norms
    exclude those channels from their mean square.
    """

    normed_size: int
    scale: float

    def store(self, name: str, values: Tensor) -> Tensor:
        """The whole base parameter `name` (ours) as the folder stores it; changes `values` in place."""
        return self._times(name, values, self.scale, first_row=0)

    def restore(self, name: str, stored: Tensor, first_row: int = 0) -> Tensor:
        """The inverse, for the rows from `first_row` on; changes `stored` in place."""
        return self._times(name, stored, 1 / self.scale, first_row)

    def _times(self, name: str, values: Tensor, factor: float, first_row: int) -> Tensor:
        if name == "embedding.base.weight":
            values[:, self.normed_size :] *= factor
        elif name.endswith(_WRITTEN_TO):
            values[max(0, self.normed_size - first_row) :] *= factor
        elif name.endswith("norm.base.weight"):  # a gain undoes the scale of the stream
            values[max(0, self.normed_size - first_row) :] /= factor
        return values
