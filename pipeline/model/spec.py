"""The architecture of a base decoder, independent of any library's configuration class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.base import BaseCode
from pipeline.errors import LayoutError
from pipeline.open_weights import OpenWeights
from pipeline.parallel.layers import NormedChannels, NormKind
from pipeline.scale.plan import Widths

Activation = Callable[[Tensor], Tensor]
_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), _gelu_tanh),
    "relu": F.relu,
}


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding, as the numbers that transformers computes from a config.

    Attributes:
        frequencies: the angle per position of each pair of channels; channels beyond the pairs are
            not rotated.
        attention_factor: cos and sin are multiplied by it.
        context: the longest text with these frequencies; None: all texts have them.
        long_frequencies: those of longer texts (longrope).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    context: int | None = None
    long_frequencies: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerKind:
    """What differs from layer to layer.

    `window` is how many tokens a token attends to, itself included; None: all before it. `rotary`
    is None in a layer without position embedding. `has_experts`: its FFN is the decoder's mixture
    of experts.
    """

    rotary: RotarySpec | None
    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts, each a gated FFN: a token takes the `top_k` with the highest scores.

    Attributes:
        intermediate_size: the inner width of one of the `experts`.
        normalised: whether the scores of the experts that a token takes are divided by their sum.
        scale: by which these scores are multiplied then.
        sigmoid: scores are sigmoids, and a bias for each expert counts for the choice alone; else
            they are a softmax.
        shared_size: the inner width of an expert that every token takes beside the others; 0: there
            is none.
        gated: the shared expert is weighted by a sigmoid of its own.
        balance_coefficient: the factor of the loss that balances the experts where the router
            trains; None: the family has none.
    """

    experts: int
    top_k: int
    intermediate_size: int
    normalised: bool
    scale: float = 1.0
    sigmoid: bool = False
    shared_size: int = 0
    gated: bool = False
    balance_coefficient: float | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder's architecture, as features that training and the exported model share.

    Attributes:
        family: its `model_type`, by which `pipeline.model.families` knows it.
        layers: the kind of each layer.
        norm_placement: whether norms stand before attention and FFN, after them (before the sum),
            or both.
        gain_offset: whether an RMSNorm's gain is 1 + weight.
        rounds_once: whether norms and rotations stay in fp32 to their end, gains, cos and sin
            included.
        query_key_norm: the RMSNorm of queries and keys: of each head, or of all heads together.
        embedding_scale: what the embedding is multiplied by.
        attention_scale: what the products of queries and keys are multiplied by; None: 1 /
            sqrt(head_dim).
        attention_softcap, output_softcap: scores, or logits, z become c · tanh(z / c); None: they
            stay.
        mixture: the mixture of experts in layers that have one; the FFN of the other layers has the
            `intermediate_size` of `widths`.
        residual: how a base that was widened before stores its residual stream.
        new_tokens: how many tokens a run adds to the vocabulary; their ids follow the base's
            `vocab_size`.
        added_tokens: how many of the last ids of `vocab_size` are new tokens of a run: a trained
            model that is read whole has their rows in the base's matrices.
    """

    family: str
    vocab_size: int
    layers: tuple[LayerKind, ...]
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
    norm_placement: Literal["before", "after", "both"] = "before"
    gain_offset: bool = False
    rounds_once: bool = False
    query_key_norm: Literal["none", "head", "all"] = "none"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    mixture: MixtureSpec | None = None
    residual: StoredResidual | None = None
    new_tokens: int = 0
    added_tokens: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_document(self) -> int:
        """The longest document on which the base can be trained beside others."""
        return self.max_position_embeddings

    @property
    def base_code(self) -> BaseCode:
        """Whose code computes the base; of that kind it is (`pipeline.model.bases`)."""
        return "native"

    @property
    def is_native(self) -> bool:
        """Whether the package's own code computes the base."""
        return self.base_code == "native"

    @property
    def noun(self) -> str:
        """What messages call a base of this kind, with its article."""
        return "a native base"

    @property
    def has_one_stream(self) -> bool:
        """Whether the base has a single residual stream, [B, S, D], which a gate can read."""
        return True

    @property
    def library_attention(self) -> str | None:
        """How a library's code attends, as a clause; None: the package's own code does."""
        return None

    def describe_own(self, own: OpenWeights) -> str | None:
        """Which modules have open weights; None: all that the settings name."""
        return None

    def to_record(self) -> dict[str, Any]:
        """The fields as JSON, but for the layers, and the rows of an extended vocabulary."""
        values = asdict(replace(self, layers=()))
        for name in ("layers", "new_tokens", "added_tokens"):
            del values[name]
        return values


def check_base_fits(spec: DecoderSpec, tp_size: int) -> None:
    """Checks that a base can be split over `tp_size` ranks.

    Raises:
        LayoutError: it cannot.
    """
    # Its mean square is over all heads, of which a rank has some: it would take a collective in
    # every layer, in the middle of a region.
    if tp_size > 1 and spec.query_key_norm == "all":
        raise LayoutError(
            f"parallel.tp_size: expected 1, because bases of family {spec.family} normalise all "
            f"heads together, found {tp_size}; use ZeRO-3"
        )
    heads = spec.widths.num_attention_heads
    kv_heads = spec.widths.num_key_value_heads
    inner: set[int] = set()
    if not all(layer.has_experts for layer in spec.layers):
        inner.add(spec.widths.intermediate_size)
    if spec.mixture is not None:
        inner.add(spec.mixture.intermediate_size)
        if spec.mixture.shared_size:
            inner.add(spec.mixture.shared_size)
    splits_widths = all(width % tp_size == 0 for width in (heads, *inner))
    # With fewer key/value heads than ranks, several ranks hold the same one, as in Megatron-LM.
    splits_kv_heads = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
    if not splits_widths or not splits_kv_heads:
        sizes = " and ".join(str(width) for width in sorted(inner))
        raise LayoutError(
            f"parallel.tp_size: expected a divisor of the base's {heads} query heads and of its "
            f"intermediate_size {sizes}, and a divisor or multiple of its {kv_heads} key/value "
            f"heads, found {tp_size}"
        )


def check_experts_fit(spec: DecoderSpec, expert_size: int) -> None:
    """Checks that `expert_size` ranks can share the experts of a base.

    Raises:
        LayoutError: they cannot.
    """
    if expert_size == 1:
        return
    if spec.mixture is None:
        raise LayoutError(
            f"parallel.expert_size: expected 1 with a base without experts (family {spec.family}), "
            f"found {expert_size}; remove it"
        )
    if spec.mixture.experts % expert_size:
        raise LayoutError(
            f"parallel.expert_size: expected a divisor of the base's {spec.mixture.experts} "
            f"experts, found {expert_size}"
        )


# Of the added channels' squares, 2^-24 stay in the mean square in fp32, 2^-12 in 16 bits: below the
# rounding error. A smaller scale would not survive where a folder is quantised: blocks have fp16
# scales, matrices have one.
_SCALE_EXPONENT = {torch.float32: 12, torch.bfloat16: 6, torch.float16: 6}
# AdamW moves a weight by about the learning rate, however small it is, and the gain multiplies that
# by 1 / scale.
_TRAINABLE_EXPONENT = 6
_WRITE_STREAM = (
    "attention.output.base.weight",
    "attention.output.base.bias",
    "ffn.down.base.weight",
    "ffn.down.base.bias",
    "ffn.base.experts.down.weight",
    "ffn.base.shared.down.base.weight",
)
_READ_STREAM = tuple(
    f"{name}.base.weight"
    for name in ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
)
_GAINS_OF_STREAM = ("attention_norm.base.weight", "ffn_norm.base.weight", "final_norm.base.weight")


def scale_in(dtype: torch.dtype, *, for_training: bool = False) -> float:
    """The scale of the added channels in a folder of `dtype`; for_training: one at which other
    tools can train them."""
    if for_training:
        return 2.0**-_TRAINABLE_EXPONENT
    return 2.0 ** -_SCALE_EXPONENT[dtype]


@dataclass(frozen=True)
class StoredResidual:
    """How a merged export of a widened model (`conversion.merged`) stores its residual stream.

    The channels from `normed_size` on, which an earlier expansion added, are stored times `scale`,
    a power of two, so that an ordinary RMSNorm hardly counts them; a norm after attention or FFN
    keeps their scale. AdamW cannot train them at that scale: its steps are as large for a weight of
    10⁻⁸ as for one of 10⁻². So reading undoes the scale, which is exact for a power of two, and the
    norms count those channels as the folder's norms do.

    Attributes:
        normed_size: how many channels the base had before it was widened.
        scale: by which the folder stores the other channels.
        read_unnormed: whether the layers have no norm before attention and FFN, so that the maps
            that read the stream undo the scale.
    """

    normed_size: int
    scale: float
    read_unnormed: bool = False

    @property
    def normed(self) -> NormedChannels:
        """How the norms count the channels at their own scale."""
        return NormedChannels(self.normed_size, self.scale)

    def store(self, name: str, values: Tensor) -> Tensor:
        """The whole base parameter `name` (ours) as the folder stores it.

        Changes `values` in place.
        """
        return self._times(name, values, self.scale, first_row=0)

    def restore(self, name: str, stored: Tensor, first_row: int = 0) -> Tensor:
        """The inverse, for the rows from `first_row` on; changes `stored` in place."""
        return self._times(name, stored, 1 / self.scale, first_row)

    def _times(self, name: str, values: Tensor, factor: float, first_row: int) -> Tensor:
        if name == "embedding.base.weight":
            values[:, self.normed_size :] *= factor
        elif name.endswith(_WRITE_STREAM):
            # The rows of a matrix, of every expert's matrix at once, or the entries of a bias.
            rows = values.movedim(-2, 0) if values.dim() > 1 else values
            rows[max(0, self.normed_size - first_row) :] *= factor
        elif self.read_unnormed and name.endswith(_READ_STREAM):
            values[:, self.normed_size :] /= factor
        elif name.endswith(_GAINS_OF_STREAM):
            # A gain undoes the scale of the stream.
            values[max(0, self.normed_size - first_row) :] /= factor
        return values
