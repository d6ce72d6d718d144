"""What an export on a hosted base caches: the keys and values of added attention, which tokens are
text, and what a gate's mean has read. It travels with the base's own cache.

Between two forwards the added layers stand behind those of the library's cache, so that beam
search, cropping and copies reach them. While the base runs they are out of it: the library looks at
all layers of a cache to size its masks, and would take an added one for the base's.

A base whose cache is none of the library's (a list of states, an object of its own) gets them as an
attribute, `added_layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from .scale_caches import GateCache


class AddedKeys(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one added attention."""

    # A static cache stays one that compiles.
    is_compileable = True
    place: tuple[int, int] = (-1, -1)
    """The layer and the block of the attention."""


class AddedText(DynamicLayer):  # type: ignore[misc]
    """Which tokens so far are text, bool [B, 1, T, 1]; the others are padding.

    Recurrent bases get the mask of padding with the prompt alone.
    """

    is_compileable = True
    has_mask = False
    """Whether any forward was given a mask; without one all is text."""

    def seen(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Adds tokens [B, S]; returns which of all so far are text, bool [B, T], or None: all.

        The mask is [B, T], or [B, S] of these tokens alone.

        Raises ValueError: it is of another length.
        """
        new = tokens.shape[1]
        whole = self.get_seq_length() + new
        is_text = torch.ones_like(tokens, dtype=torch.bool)
        if attention_mask is not None:
            self.has_mask = True
            given = attention_mask.shape[1]
            if given < whole and given != new:
                raise ValueError(
                    f"attention_mask: expected {whole} columns, one for each token so far, found "
                    f"{given}"
                )
            is_text = attention_mask[:, :whole][:, -new:].bool()
        known, _ = self.update(is_text[:, None, :, None], is_text[:, None, :, None])
        if attention_mask is not None and attention_mask.shape[1] >= whole:
            return attention_mask[:, :whole].bool()
        return known[:, 0, :, 0] if self.has_mask else None


class AddedStates(list[Any]):
    """The states of a base that keeps them in a plain list, which takes no attribute."""


ADDED = (AddedKeys, AddedText, GateCache)
_ATTRIBUTE = "added_layers"


def given_cache(arguments: Iterable[Any]) -> Any:
    """The cache among the arguments of a forward; None: there is none."""
    for value in arguments:
        if isinstance(value, (Cache, EncoderDecoderCache)) or hasattr(value, _ATTRIBUTE):
            return value
    return None


def taken_from(cache: Any) -> list[Any]:
    """Takes the added layers out of a cache; the cache may be None."""
    layers = _library_layers(cache)
    if layers is None:
        return list(getattr(cache, _ATTRIBUTE, ()))
    added = [layer for layer in layers if isinstance(layer, ADDED)]
    layers[:] = [layer for layer in layers if not isinstance(layer, ADDED)]
    return added


def given_back(cache: Any, added: Iterable[Any]) -> Any:
    """Puts the added layers into a cache; returns it, or what stands in its place.

    Raises ValueError: the cache cannot hold them.
    """
    layers = _library_layers(cache)
    if layers is not None:
        layers.extend(added)
        return cache
    if type(cache) is list:
        cache = AddedStates(cache)
    try:
        setattr(cache, _ATTRIBUTE, list(added))
    except AttributeError:
        raise ValueError(
            f"the base's cache is a {type(cache).__name__}, which cannot hold what added attention "
            "has read; call with use_cache=False"
        ) from None
    return cache


def _library_layers(cache: Any) -> list[Any] | None:
    """The layers of a cache of the library; None: it is none."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache.layers if isinstance(cache, Cache) else None
