"""What a base decoder looks like, in one frozen record that no library's configuration class leaks into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
