"""The two residual streams of a model widened by SCALE, and the maps and norms that read and write
both.

Every linear map has four blocks (SCALE, Eq. 1):

    [ Y    ]   [ base               expansion_to_base      ] [ X    ]
    [ Y^up ] = [ base_to_expansion  expansion_to_expansion ] [ X^up ]

`expansion_to_base` exists only in collaborative layers. x_up is None where the base runs alone,
and in a model that is not wider than its base: maps and norms then compute the base's part only.

Tokens that a gate opens may have weights of their own beside the base's (docs/gate.md of
scale-cpt): an `adapter` of a linear map, an `own` gain of a norm, `own_rows` of the output. Each is
a difference, as expansion_to_base is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_scale import ScaleConfig
from .open_tokens import ALL_OPEN, OpenTokens
from .scale_math import (
    NEVER,
    keeps_preserved_path,
    layer_norm_by,
    own_row_logits,
    rms_normalised,
    separate_products,
    soft_capped,
    sum_of_squares,
    with_gain,
    without_new_tokens,
)
from .scale_open_weights import ScaleLowRank, own_row_table

CLOSED_CHANNELS = 8
"""How many channels of the output's hidden states say that a token is closed: one, and zeros, as
products are fast on rows of whole 16 bytes.
"""
ROUTED_TOKENS = 256
"""For how many tokens of a text the router compares logits at a time."""


class StreamPath(NamedTuple):
    """The streams of one path: x [B, S, D], and x_up [B, S, U] or None.

    `open_tokens` read every expansion_to_base, and the weights that are for them alone. Where the
    base runs alone, none is open, and x_up is None.
    """

    x: Tensor
    x_up: Tensor | None
    open_tokens: OpenTokens = ALL_OPEN

    def normed(self, norm: nn.Module | None) -> StreamPath:
        """The path with both streams normalised, or as it is if there is no norm."""
        if norm is None:
            return self
        x, x_up = norm(self.x, self.x_up, self.open_tokens)
        return StreamPath(x, x_up, self.open_tokens)

    def at(self, tokens: slice | Tensor) -> StreamPath:
        """The path at some tokens alone."""
        x_up = None if self.x_up is None else self.x_up[:, tokens]
        return StreamPath(self.x[:, tokens], x_up, self.open_tokens.at(tokens))


class ScaleLinear(nn.Module):
    """x [..., in], x_up [..., in_up] -> y [..., out], y_up [..., out_up]. Sizes are (base,
    expansion) pairs; an expansion of size 0 has no blocks.
    """

    def __init__(
        self,
        sizes_in: tuple[int, int],
        sizes_out: tuple[int, int],
        bias: bool,
        collaborative: bool,
        adapter: ScaleLowRank | None = None,
    ) -> None:
        super().__init__()
        size_in, up_in = sizes_in
        size_out, up_out = sizes_out
        self.base = nn.Linear(size_in, size_out, bias=bias)
        self.adapter = adapter
        self.expansion_to_base: nn.Module | None = None
        self.base_to_expansion: nn.Module | None = None
        self.expansion_to_expansion: nn.Module | None = None
        if collaborative:
            self.expansion_to_base = nn.Linear(up_in, size_out, bias=False)
        if up_out > 0:
            self.base_to_expansion = nn.Linear(size_in, up_out, bias=bias)
            self.expansion_to_expansion = nn.Linear(up_in, up_out, bias=False)

    def forward(
        self, x: Tensor, x_up: Tensor | None, open_tokens: OpenTokens
    ) -> tuple[Tensor, Tensor | None]:
        y = self.base(x)
        if self.adapter is not None:
            y = open_tokens.add(y, self.adapter, x)
        if x_up is None or self.base_to_expansion is None or self.expansion_to_expansion is None:
            return y, None
        if self.expansion_to_base is not None:
            y = open_tokens.add(y, self.expansion_to_base, x_up)
        return y, self.base_to_expansion(x) + self.expansion_to_expansion(x_up)


class ScaleStreamNorm(nn.Module):
    """RMSNorm or LayerNorm of one stream [..., size], in fp32; its statistics may be those of the
    other stream.

    With `normed_size` (RMSNorm only) the channels after the first so many count times `rest_scale`
    in them. With `gain_offset` (RMSNorm only) the gain is 1 + weight; what open tokens add to a
    gain (`is_own`) is the weight itself. With `rounds_once` a gain multiplies in fp32.
    """

    def __init__(
        self,
        config: ScaleConfig,
        size: int,
        kind: str,
        normed_size: int | None = None,
        *,
        is_own: bool = False,
    ) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.gain_offset = config.gain_offset and not is_own
        self.rounds_once = config.rounds_once and not is_own
        self.normed_size = normed_size
        self.rest_scale = config.rest_scale
        self.weight = nn.Parameter(torch.zeros(size) if is_own else torch.ones(size))
        self.bias: nn.Parameter | None = None
        if kind == "layernorm":
            self.bias = nn.Parameter(torch.zeros(size))

    def normalised(self, x: Tensor, statistics_of: Tensor) -> Tensor | None:
        """x without a gain, in fp32, by the statistics of a stream (RMSNorm only)."""
        if self.bias is not None:
            return None
        squares = sum_of_squares(statistics_of, self.normed_size, self.rest_scale)
        return rms_normalised(x, squares / statistics_of.shape[-1], self.eps)

    def forward(
        self, x: Tensor, statistics_of: Tensor | None = None, normal: Tensor | None = None
    ) -> Tensor:
        """`normal` is what `normalised` made of x, where the caller has it for several norms."""
        source = x if statistics_of is None else statistics_of
        if self.bias is not None:
            if statistics_of is None:
                return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
            return layer_norm_by(statistics_of, x, self.weight, self.bias, self.eps)
        if normal is None:
            normal = self.normalised(x, source)
        assert normal is not None, "an RMSNorm has no bias"
        return with_gain(normal, self.weight, x.dtype, self.gain_offset, self.rounds_once)


class ScaleNorm(nn.Module):
    """Both streams normalised: the base by its own statistics, the expansion by its own or by the
    base's.
    """

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        """`layer`: the index of its layer; the number of layers: it is the last norm."""
        super().__init__()
        self.shares_statistics = config.norm_statistics == "base"
        normed_size = config.normed_size
        self.base = ScaleStreamNorm(config, config.hidden_size, config.norm, normed_size)
        self.own: ScaleStreamNorm | None = None
        if config.has_own_gains(layer):
            self.own = ScaleStreamNorm(
                config, config.hidden_size, config.norm, normed_size, is_own=True
            )
        self.expansion: ScaleStreamNorm | None = None
        if config.expansion_hidden_size:
            # `normed_size` is about the channels of x, from which the statistics are taken.
            normed_size = config.normed_size if self.shares_statistics else None
            self.expansion = ScaleStreamNorm(
                config, config.expansion_hidden_size, config.norm, normed_size
            )

    def forward(
        self, x: Tensor, x_up: Tensor | None, open_tokens: OpenTokens = ALL_OPEN
    ) -> tuple[Tensor, Tensor | None]:
        if self.own is None or open_tokens.none:
            y = self.base(x)
        else:
            # Both gains multiply one normalised x.
            normal = self.base.normalised(x, x)
            y = self.base(x, normal=normal)
            y = open_tokens.choose(y, y + self.own(x, normal=normal))
        if x_up is None or self.expansion is None:
            return y, None
        if self.shares_statistics:
            return y, self.expansion(x_up, x)
        return y, self.expansion(x_up)


class ScaleHeadNorm(nn.Module):
    """The RMSNorm of queries or keys, base's and added ones: every head by its own statistics, or
    all together.
    """

    def __init__(self, config: ScaleConfig, layer: int, sizes: tuple[int, int]) -> None:
        """`sizes`: the channels of the base's heads and of the added heads."""
        super().__init__()
        size = size_up = config.head_dim
        has_own_gains = config.norm_statistics == "separate"
        if config.query_key_norm == "all":
            size, size_up = sizes
            has_own_gains = True
        self.base = ScaleStreamNorm(config, size, "rmsnorm")
        self.own: ScaleStreamNorm | None = None
        if config.has_own_gains(layer):
            self.own = ScaleStreamNorm(config, size, "rmsnorm", is_own=True)
        # None: the added heads have the base's gains.
        self.expansion: ScaleStreamNorm | None = None
        if has_own_gains and config.expansion_num_attention_heads:
            self.expansion = ScaleStreamNorm(config, size_up, "rmsnorm")

    def forward(
        self, heads: Tensor, heads_up: Tensor | None, open_tokens: OpenTokens
    ) -> tuple[Tensor, Tensor | None]:
        normed = _normed_by_head(self.base, heads)
        if self.own is not None:
            normed = open_tokens.add(normed, partial(_normed_by_head, self.own), heads)
        if heads_up is None:
            return normed, None
        norm_up = self.base if self.expansion is None else self.expansion
        return normed, _normed_by_head(norm_up, heads_up)


def _normed_by_head(norm: ScaleStreamNorm, flat: Tensor) -> Tensor:
    """flat: [B, S, heads · size], of which every `size` channels are normalised."""
    size = len(norm.weight)
    normed: Tensor = norm(flat.unflatten(-1, (-1, size)))
    return normed.flatten(-2)


class ScaleEmbedding(nn.Module):
    """The base's token embedding beside the added columns, from which the expansion stream starts:
    [B, S, D + U].
    """

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.base = nn.Embedding(config.vocab_size, config.hidden_size)
        self.expansion: nn.Embedding | None = None
        if config.expansion_hidden_size:
            self.expansion = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.scale = config.embedding_scale
        self.is_tied = getattr(config, "tie_word_embeddings", False)
        self.num_embeddings = config.vocab_size
        self.embedding_dim = config.hidden_size + config.expansion_hidden_size

    @property
    def is_of_base_alone(self) -> bool:
        """Whether it gives what `base` does: there are no added columns and no factor."""
        return self.expansion is None and self.scale == 1.0

    @property
    def weight(self) -> Tensor:
        """Both matrices as one [V, D + U], for libraries that read its shape or its rows."""
        if self.expansion is None:
            return self.base.weight
        return torch.cat([self.base.weight, self.expansion.weight], dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        has_own_rows_of_peft = hasattr(self.base, "token_indices") or hasattr(
            self.base, "token_adapter"
        )
        if self.is_tied and has_own_rows_of_peft:
            raise ValueError(
                "trainable tokens: embedding and output of this model are one matrix (tied), of "
                "which PEFT would train the embedding's rows and merge both; train adapters of "
                "linear maps alone"
            )
        embedded: Tensor = self.base(tokens)
        if self.expansion is not None:
            embedded = torch.cat([embedded, self.expansion(tokens)], dim=-1)
        if self.scale == 1.0:
            return embedded
        # The factor is rounded to the type of the streams, as transformers does. It is made on
        # their device: a copy from the host would make it wait, and cannot be captured in a CUDA
        # graph.
        return embedded * embedded.new_full((), self.scale)


class ScaleOutput(nn.Module):
    """logits = base x + expansion x_up, or the router's choice of two paths. A tied base is the
    embedding's own.

    Tokens that the gate opens add the product of x with `own_rows`, if there are any. With
    `output_softcap` c a logit is c · tanh(z / c); the router compares z itself.
    """

    row_of_token: Tensor

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.threshold = config.router_threshold
        self.softcap = config.output_softcap
        self.set_vocabulary(config)
        self.base = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.expansion: nn.Parameter | None = None
        if config.expansion_hidden_size:
            size = (config.vocab_size, config.expansion_hidden_size)
            self.expansion = nn.Parameter(torch.empty(size))
        self.own_rows: nn.Parameter | None = None
        if config.own_rows:
            self.own_rows = nn.Parameter(torch.empty(config.own_rows, config.hidden_size))
            self.register_buffer("row_of_token", own_row_table(config))

    @property
    def weight(self) -> Tensor:
        """All matrices beside each other, [V, C], for libraries that compute logits, or a loss,
        from hidden states: see `hidden_states`.

        Raises:
            ValueError: DeepSpeed has partitioned the matrices.
        """
        if self.base.numel() == 0:
            raise ValueError(
                "the output matrices are partitioned (ZeRO-3), and are not read one by one: take "
                "ZeRO-1, ZeRO-2 or FSDP, or the loss of model(input_ids, labels=labels)"
            )
        parts: list[Tensor] = [self.base]
        if self.expansion is not None:
            parts.append(self.expansion)
        if self.own_rows is not None:
            parts.append(self.own_rows[self.row_of_token])
        if self.is_gated_vocabulary:
            of_closed = self.base.new_zeros(len(self.base), CLOSED_CHANNELS)
            of_closed[self.base_columns :, 0] = max(NEVER, torch.finfo(self.base.dtype).min)
            parts.append(of_closed)
        # A single matrix is given itself, as a parameter.
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @property
    def bias(self) -> None:
        """None: there is none, which such libraries ask too."""

    def hidden_states(self, paths: list[StreamPath], closed: Tensor | None) -> Tensor:
        """What times `weight` gives the logits before their cap: [B, S, C].

        These are x, and each if the model has it: x_up; x again, zeros for closed tokens, for the
        rows that open tokens have of their own; and whether a token is closed, by which new tokens
        get a probability of zero. Arguments: `forward`.
        """
        path = paths[0] if len(paths) == 1 else self._joined_paths(*paths)
        x = path.x
        parts = [x]
        if self.expansion is not None:
            x_up = path.x_up
            if x_up is None:  # the base ran alone
                x_up = x.new_zeros(*x.shape[:2], self.expansion.shape[1])
            parts.append(x_up)
        if self.own_rows is not None:
            of_open = x
            if path.open_tokens.none:  # the base ran alone
                of_open = torch.zeros_like(x)
            elif closed is not None:
                of_open = x.masked_fill(closed, 0)
            parts.append(of_open)
        if self.is_gated_vocabulary and closed is not None:
            parts.append(F.pad(closed.to(x.dtype), (0, CLOSED_CHANNELS - 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _joined_paths(self, preserved: StreamPath, adapted: StreamPath) -> StreamPath:
        """The path whose logits are the router's choice of two."""
        keeps_preserved = []
        with torch.no_grad():
            # Some tokens at a time: logits of all would be what callers avoid.
            for x_p, x_a in zip(
                preserved.x.split(ROUTED_TOKENS, dim=1),
                adapted.x.split(ROUTED_TOKENS, dim=1),
                strict=True,
            ):
                z_p = self._base_logits(x_p)
                keeps_preserved.append(self._keeps_preserved(z_p, self._base_logits(x_a)))
        is_preserved = torch.cat(keeps_preserved, dim=1)
        x = torch.where(is_preserved, (preserved.x + adapted.x) / 2, adapted.x)
        x_up = adapted.x_up
        if x_up is not None and preserved.x_up is not None:
            x_up = torch.where(is_preserved, preserved.x_up, x_up)
        return adapted._replace(x=x, x_up=x_up)

    def set_vocabulary(self, config: ScaleConfig) -> None:
        """Reads from the config how many of the tokens are the base's; the others follow them."""
        self.base_columns = config.base_vocab_size or config.vocab_size
        # Whether a gate may close a token, after which the base's own tokens alone are possible.
        self.is_gated_vocabulary = (
            config.gate_layer is not None and self.base_columns < config.vocab_size
        )

    def forward(self, paths: list[StreamPath], closed: Tensor | None = None) -> Tensor:
        """The logits [B, S, V] in fp32.

        Args:
            paths: one path, or the preserved and the adapted one of a routed model.
            closed: which tokens the gate has closed, bool [B, S, 1]; None: there is no gate.
        """
        adapted = paths[-1]
        x_up = adapted.x_up
        z = self._base_logits(adapted.x)
        if len(paths) == 2:
            preserved = paths[0]
            z_p = self._base_logits(preserved.x)
            is_preserved = self._keeps_preserved(z_p, z)
            z = torch.where(is_preserved, (z_p + z) / 2, z)
            if x_up is not None and preserved.x_up is not None:
                x_up = torch.where(is_preserved, preserved.x_up, x_up)
        if x_up is not None and self.expansion is not None:
            z = z + F.linear(x_up, self.expansion)
        if self.own_rows is not None and not adapted.open_tokens.none:
            z = z + self._own_logits(adapted.x, self.own_rows, closed)
        z = soft_capped(z, self.softcap)
        if closed is not None and self.is_gated_vocabulary:
            z = without_new_tokens(z, closed, self.base_columns)
        return z

    def _own_logits(self, x: Tensor, own_rows: Tensor, closed: Tensor | None) -> Tensor:
        """What own rows add to the logits of open tokens, and 0 for others: [B, S, V] in fp32."""
        change = own_row_logits(x, own_rows, self.row_of_token)
        if closed is None:
            return change
        return change.masked_fill(closed, 0)

    def _base_logits(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, V] in fp32."""
        if not self.is_gated_vocabulary:
            return F.linear(x, self.base).float()
        rows = [self.base_columns, len(self.base) - self.base_columns]
        return separate_products(x, self.base, rows).float()

    def _keeps_preserved(self, z_p: Tensor, z_a: Tensor) -> Tensor:
        """For which tokens the router keeps the preserved path, by the logits of the base's own
        tokens: [B, S, 1].
        """
        z_p = z_p[..., : self.base_columns]
        z_a = z_a[..., : self.base_columns]
        product = (z_p * z_a).sum(-1, keepdim=True)
        square_p = z_p.square().sum(-1, keepdim=True)
        square_a = z_a.square().sum(-1, keepdim=True)
        return keeps_preserved_path(product, square_p, square_a, self.threshold)
