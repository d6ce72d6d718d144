"""The blocks that stand beside the blocks of a hosted base."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_scale_hosted import HostedScaleConfig
from .open_tokens import OpenTokens
from .scale_added_maps import AddedColumnMap, AddedRowMap
from .scale_hosted_cache import AddedKeys
from .scale_math import rotate, with_gain
from .scale_rotary import ScaleRotary


class HostedNorm(nn.Module):
    """x_up / rms(x_up) · weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_up: Tensor) -> Tensor:
        normal = F.rms_norm(x_up.float(), x_up.shape[-1:], eps=self.eps)
        return with_gain(normal, self.weight, x_up.dtype, False)


class HostedAttention(nn.Module):
    """Causal heads beside a token mixer."""

    def __init__(self, config: HostedScaleConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.expansion_num_attention_heads
        kv_heads = config.expansion_num_key_value_heads
        self.queries_per_key = heads // kv_heads
        streams = (config.hidden_size, config.expansion_hidden_size)
        self.stream_norm = HostedNorm(config.expansion_hidden_size, config.norm_eps)
        self.query = AddedColumnMap(streams, heads * config.head_dim)
        self.key = AddedColumnMap(streams, kv_heads * config.head_dim)
        self.value = AddedColumnMap(streams, kv_heads * config.head_dim)
        self.output = AddedRowMap(
            streams,
            heads * config.head_dim,
            collaborative=config.is_collaborative(layer, "attention"),
        )

    def forward(
        self,
        x: Tensor,
        x_up: Tensor,
        y: Tensor,
        inputs: HostedInputs,
        keys: AddedKeys | None,
        open_tokens: OpenTokens,
    ) -> tuple[Tensor, Tensor]:
        """x, y: [B, S, D], x_up: [B, S, U] -> the changed y, and y_up."""
        x_up = self.stream_norm(x_up)
        query = inputs.rotated(self.query(x, x_up).unflatten(-1, (-1, self.head_dim)))
        key = inputs.rotated(self.key(x, x_up).unflatten(-1, (-1, self.head_dim)))
        value = self.value(x, x_up).unflatten(-1, (-1, self.head_dim))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if keys is not None:
            key, value = keys.update(key, value)
        heads = inputs.attended(
            query,
            key.repeat_interleave(self.queries_per_key, dim=1),
            value.repeat_interleave(self.queries_per_key, dim=1),
        )
        return self.output(y, heads.transpose(1, 2).flatten(2), open_tokens)


class HostedFeedForward(nn.Module):
    """An FFN beside an FFN of the base."""

    def __init__(self, config: HostedScaleConfig, layer: int) -> None:
        super().__init__()
        inner = config.expansion_intermediate_size
        self.activation = ACT2FN[config.hidden_act]
        streams = (config.hidden_size, config.expansion_hidden_size)
        self.stream_norm = HostedNorm(config.expansion_hidden_size, config.norm_eps)
        self.gate = AddedColumnMap(streams, inner)
        self.up = AddedColumnMap(streams, inner)
        self.down = AddedRowMap(streams, inner, collaborative=config.is_collaborative(layer, "ffn"))

    def forward(
        self,
        x: Tensor,
        x_up: Tensor,
        y: Tensor,
        inputs: HostedInputs,
        keys: AddedKeys | None,
        open_tokens: OpenTokens,
    ) -> tuple[Tensor, Tensor]:
        """Shapes as in `HostedAttention`; `inputs` and `keys` are for that alone."""
        x_up = self.stream_norm(x_up)
        return self.down(y, self.activation(self.gate(x, x_up)) * self.up(x, x_up), open_tokens)


class HostedInputs:
    """What all added attentions of a forward read beside the streams.

    Attributes:
        past: how many tokens the cache holds.
        visible: bool [B, 1, S, past + S], which tokens each token attends to; None: all so far, but
            for padding where there is a `text_first`.
        text_first: [B, 1, S, 1], the places of a prompt's tokens with padding behind its text;
            None: nothing is known to be padding, or `visible` hides it.
        is_text: bool [B, S], false for padding; None: all is text.
    """

    def __init__(
        self,
        tokens: Tensor,
        past: int,
        known: Tensor | None,
        position_ids: Tensor | None,
        rotary: ScaleRotary,
        dtype: torch.dtype,
    ) -> None:
        """`known`: which of all tokens so far are text, bool [B, past + S]; None: all."""
        length = tokens.shape[1]
        self.past = past
        place = torch.arange(past + length, device=tokens.device)
        self.is_text: Tensor | None = None
        if known is not None:
            self.is_text = known[:, past:]
        documents = None
        if position_ids is None:
            position_ids = place[None, past:]
        elif position_ids.dim() == 3:
            position_ids = position_ids[0]  # rows of M-RoPE: the first counts the text
        elif past == 0 and known is None:
            # As transformers reads them: positions that begin again are another document.
            documents = (position_ids.diff(dim=1) != 1).cumsum(1)
            documents = F.pad(documents, (1, 0))
        self.visible: Tensor | None = None
        self.text_first: Tensor | None = None
        if past == 0 and documents is None:
            if known is not None:
                is_padding = (~known).to(torch.uint8)
                self.text_first = is_padding.argsort(dim=1, stable=True)[:, None, :, None]
                self._as_given = self.text_first.argsort(dim=2)
        elif length > 1 or known is not None:
            self.visible = _visible(place, past, known, documents)
        cos, sin = rotary(position_ids, dtype)
        # The tables are for heads [B, H, S, K].
        self._cos = cos.transpose(1, 2)
        self._sin = sin.transpose(1, 2)

    def rotated(self, heads: Tensor) -> Tensor:
        """heads: [B, S, H, K], turned by their positions."""
        return rotate(heads, self._cos, self._sin)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [B, H, S, K], key and value: [B, H, past + S, K] -> [B, H, S, K]."""
        if self.text_first is None:
            is_prompt = self.past == 0 and self.visible is None
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.visible, is_causal=is_prompt
            )
        # With its padding behind it a text attends as one without padding. So no mask of S x S is
        # made, and the host is not asked whether there is any padding.
        heads = F.scaled_dot_product_attention(
            query.take_along_dim(self.text_first, dim=2),
            key.take_along_dim(self.text_first, dim=2),
            value.take_along_dim(self.text_first, dim=2),
            is_causal=True,
        )
        return heads.take_along_dim(self._as_given, dim=2)


def _visible(place: Tensor, past: int, known: Tensor | None, documents: Tensor | None) -> Tensor:
    """Which tokens each token attends to, bool [B or 1, 1, S, past + S].

    Args:
        place: [past + S], the numbers of all tokens.
        past: how many of them the cache holds.
        known: bool [B, past + S], false for padding; None: all is text.
        documents: [B, S], equal numbers for the tokens of one document; None: each row is one.
    """
    visible = (place[None] <= place[past:, None])[None]
    if known is not None:
        # Padding sees itself: a row of a softmax must not be empty.
        is_itself = place[None] == place[past:, None]
        visible = visible & known[:, None] | is_itself
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None])
    return visible[:, None]
