"""The gate: which tokens are new to the base, by a linear score of the base's own stream; and what
it caches of a text.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from .configuration_scale import ScaleConfig
from .scale_math import WINDOW, gate_scores, running_mean, stream_over_rms


class ScaleGate(nn.Module):
    """Which tokens are open, by a linear score of the base's x [B, S, D].

    Read are x over its root mean square, standardised, and with `token+running_mean` also its mean
    over the text so far, in which each token counts less by `gate_decay` with every token after it.
    All is computed in fp32. Ids that old text never has are open whatever the score: `opens_id`.

    A gate was fitted, and does not train: its tensors are buffers, which optimizers and their
    weight decay leave alone, and which casting the model leaves in fp32.
    """

    mean: Tensor
    std: Tensor
    weight: Tensor
    is_open_id: Tensor | None

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.decay = config.gate_decay
        self.bias = config.gate_bias
        self.threshold = config.gate_threshold
        self.has_mean = config.gate_features == "token+running_mean"
        size = config.hidden_size * (2 if self.has_mean else 1)
        for name in ("mean", "std", "weight"):
            # Made of integers: under DeepSpeed's `zero.Init` a new tensor of floats has 16 bits.
            bits = torch.zeros(size, dtype=torch.int32)
            self.register_buffer(name, bits.view(torch.float32))
        self.std.fill_(1)
        table: Tensor | None = None
        if config.gate_open_ids:
            # [V] of the base's vocabulary, yet to be read from the folder.
            table = torch.zeros(config.base_vocab_size or config.vocab_size, dtype=torch.bool)
        self.register_buffer("is_open_id", table)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the gate as any module, in its types: in 16 bits it would decide otherwise."""
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, values in exact.items():
            moved = self.get_buffer(name)
            if moved.dtype != values.dtype:
                self.register_buffer(name, values.to(moved.device))
        return self

    def forward(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """Whether each token is open by its score: bool [B, S, 1]; see `scores`."""
        return self.scores(x, is_text, documents, cache) > self.threshold

    def opens_id(self, tokens: Tensor) -> Tensor | None:
        """Whether each of the tokens [B, S] is open by its id: bool [B, S, 1]; None: no id is."""
        if self.is_open_id is None:
            return None
        tokens = tokens.to(self.is_open_id.device).unsqueeze(-1)
        # Ids behind the base's are new tokens, its own or another expansion's.
        last = len(self.is_open_id) - 1
        # The library loads all of a gate in fp32, this table too.
        return self.is_open_id[tokens.clamp(max=last)].bool() & (tokens <= last)

    def scores(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """The log odds that each token is new, [B, S, 1].

        Args:
            x: [B, S, D], the base's stream.
            is_text: bool [B, S], false for padding; None: all is text.
            documents: [B, S], equal numbers for the tokens of one document; None: each row is one.
            cache: what the running mean reads of earlier tokens, to which these are added; None:
                there are none.

        Raises:
            ValueError: the gate was rounded, and would decide otherwise.
        """
        if self.weight.dtype != torch.float32:
            raise ValueError(
                f"the gate (token_gate): expected torch.float32, found {self.weight.dtype}, in "
                "which it would open for other text; whatever casts buffers, such as FSDP1's "
                "buffer_dtype, must leave it alone"
            )
        features = stream_over_rms(x)
        if self.has_mean:
            mean = self._running_mean(features, is_text, documents, cache)
            features = torch.cat([features, mean], dim=-1)
        return gate_scores(features, self.mean, self.std, self.weight, self.bias).unsqueeze(-1)

    def _running_mean(
        self,
        values: Tensor,
        is_text: Tensor | None,
        documents: Tensor | None,
        cache: GateCache | None,
    ) -> Tensor:
        length = values.shape[1]
        if is_text is None:
            counts = values.new_ones(*values.shape[:2], 1)
        else:
            counts = is_text.to(values).unsqueeze(-1)
        if cache is not None:
            read_values, read_counts = cache.update(values.unsqueeze(1), counts.unsqueeze(1))
            values = read_values[:, 0]
            counts = read_counts[:, 0]
        return running_mean(values, documents, counts, self.decay)[:, -length:]


def texts_of(
    x: Tensor, attention_mask: Any, position_ids: Tensor, cache: Any
) -> tuple[Tensor | None, Tensor | None]:
    """What a gate reads beside x [B, S, D]: which tokens are text and no padding, and of which
    document each token is.

    Both are [B, S]. None: all are text, or of one document in each row.
    """
    is_text: Tensor | None = None
    documents: Tensor | None = None
    if attention_mask is None and cache is None:
        # As for attention (`create_causal_mask`): positions that begin again are another text in
        # the same row.
        breaks = position_ids.expand(x.shape[:2]).diff(dim=1) != 1
        documents = F.pad(breaks.cumsum(dim=1), (1, 0))
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_text = attention_mask[:, -x.shape[1] :].bool()
    return is_text, documents


class GateCache(DynamicLayer):  # type: ignore[misc]
    """What a gate's running mean reads of the last tokens, and of WINDOW before, so that as many
    can be cropped.

    It is one more layer of the library's cache, so that it is reordered and cropped with the
    others. Static caches mask their empty places only if all layers are like theirs.
    """

    is_compileable = True
    dropped = False
    """Whether the text is longer than what is kept of it."""

    def update(self, features: Tensor, counts: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds features [B, 1, S, D] and counts [B, 1, S, 1]; returns those that S tokens read."""
        whole_features, whole_counts = super().update(features, counts)
        new = features.shape[2]
        kept = WINDOW - 1 + max(new, WINDOW)
        read = WINDOW - 1 + new
        self.dropped = self.dropped or whole_features.shape[2] > kept
        self.keys = whole_features[:, :, -kept:]
        self.values = whole_counts[:, :, -kept:]
        return self.keys[:, :, -read:], self.values[:, :, -read:]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.dropped and self.keys.shape[2] < WINDOW - 1:
            raise RuntimeError(
                f"a gate's running mean can be cropped by {WINDOW} tokens; compute the text again"
            )

    def reset(self) -> None:
        super().reset()
        self.dropped = False


class TextCache(DynamicLayer):  # type: ignore[misc]
    """The text so far, its tokens and positions (`keys`), and its gates' decisions (`values`).

    It is one more layer of the library's cache, as a GateCache is.
    """

    is_compileable = True
    has_expansion = False
    """Whether the other layers hold the expansion's heads too; those of sequences that have not
    been open are zeros.
    """

    def opened(self, tokens: Tensor) -> Tensor:
        """For which of the sequences, to be continued by `tokens` [B, S], the gate has opened: bool
        [B].
        """
        if self.get_seq_length() == 0:
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return self.values.flatten(1).any(1)

    def reset(self) -> None:
        super().reset()
        self.has_expansion = False


def layer_of(kind: type[DynamicLayer], cache: Any) -> Any:
    """The layer of this kind in `cache`, which gets one if it has none."""
    for layer in cache.layers:
        if type(layer) is kind:
            return layer
    added = kind()
    cache.layers.append(added)
    return added


def empty_like(cache: DynamicCache | None, config: PretrainedConfig) -> DynamicCache:
    """An empty cache for a model; like `cache`, it keeps what sliding windows no longer read, for
    cropping, or not.
    """
    new = DynamicCache(config=config)
    if cache is None:
        return new
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        new.activate_past_recording()
    return new


def lacks_expansion(cache: Any) -> bool:
    """Whether `cache` holds a text that the base has read alone."""
    if cache is None:
        return False
    for layer in cache.layers:
        is_read = type(layer) is TextCache and layer.get_seq_length() > 0
        if is_read and not layer.opened(layer.keys).all():
            return True
    return False


def set_rows(cache: Any, rows: Tensor, own: DynamicCache) -> None:
    """Makes the sequences `rows` [B] of those layers that `cache` and `own` both have `own`'s.

    The other sequences get zeros for heads that they do not have yet.
    """
    if rows.all():
        cache.layers[: len(own.layers)] = own.layers
        return
    for layer, other in zip(cache.layers, own.layers, strict=False):
        missing_heads = other.keys.shape[1] - layer.keys.shape[1]
        padding = (0, 0, 0, 0, 0, missing_heads)
        layer.keys = F.pad(layer.keys, padding)
        layer.values = F.pad(layer.values, padding)
        layer.keys[rows] = other.keys
        layer.values[rows] = other.values
