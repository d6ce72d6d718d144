"""What a text leaves behind in the library's cache beside keys and values: layers of a gate's, and
of the text itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from .scale_math import WINDOW


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


def layer_of(kind: type[DynamicLayer], layers: list[Any]) -> Any:
    """The layer of this kind among those of a cache, which gets one if it has none."""
    for layer in layers:
        if type(layer) is kind:
            return layer
    added = kind()
    layers.append(added)
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
