"""What a base decoder looks like, in one frozen record that no library's configuration class leaks into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import LayoutError
from pipeline.model.residual import StoredResidual
from pipeline.scale.norm import NormKind
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
