"""What a text leaves behind in a model: beside the library's keys and values, of gates and of several expansions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .configuration_scale import ScaleConfig

WINDOW_DOUBLINGS = 7
WINDOW = 2**WINDOW_DOUBLINGS
"""How many tokens a running mean reads; what it leaves out is below the resolution of fp32."""
BASE = 0
"""The index of the base among the paths; expansions follow, from 1 on."""


class GateCache(DynamicLayer):  # type: ignore[misc]
    """What a gate's running mean reads of the last tokens, and of WINDOW before, so that as many can be cropped.

    A layer more in the cache, so that it is reordered and cropped with the others. Static caches mask their empty
    places only if all layers are like theirs.
    """

    is_compileable = True
    dropped = False
    """Whether the text is longer than what is kept of it."""

    def update(self, features: Tensor, counts: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds features [B, 1, S, D] and counts [B, 1, S, 1]; returns those that S tokens read."""
        whole = super().update(features, counts)
        new, length = features.shape[2], whole[0].shape[2]
        kept, read = WINDOW - 1 + max(new, WINDOW), WINDOW - 1 + new
        self.keys, self.values = (tensor[:, :, -kept:] for tensor in whole)
        self.dropped = self.dropped or length > kept
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
    """The text so far, its tokens and positions, and its gates' decisions: a layer more, as a GateCache."""

    is_compileable = True
    has_expansion = False
    """Whether the other layers have the expansion's heads too, those of sequences that have not been open as zeros."""

    def opened(self, tokens: Tensor) -> Tensor:
        """For which of the sequences, to be continued by `tokens` [B, S], the gate has opened: bool [B]."""
        if self.get_seq_length() == 0:
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return self.values.flatten(1).any(1)

    def reset(self) -> None:
        super().reset()
        self.has_expansion = False


def layer_of(kind: type[DynamicLayer], cache: Any) -> Any:
    """The layer of this kind in `cache`, which gets one."""
    for layer in cache.layers:
        if type(layer) is kind:
            return layer
    added = kind()
    cache.layers.append(added)
    return added


def empty_like(cache: DynamicCache | None, config: ScaleConfig) -> DynamicCache:
    """An empty cache for a model, which keeps what sliding windows no longer read where `cache` does, for cropping."""
    new = DynamicCache(config=config)
    if cache is not None and any(getattr(layer, "record_past", False) for layer in cache.layers):
        new.activate_past_recording()
    return new


def lacks_expansion(cache: Any) -> bool:
    """Whether `cache` holds a text that the base has read alone."""
    texts = [] if cache is None else [layer for layer in cache.layers if type(layer) is TextCache]
    return any(text.get_seq_length() > 0 and not text.opened(text.keys).all() for text in texts)


def set_rows(cache: Any, rows: Tensor, own: DynamicCache) -> None:
    """The sequences `rows` [B] of the layers that `cache` and `own` both have become `own`'s.

    Of heads that the others do not have yet, they get zeros.
    """
    if rows.all():
        cache.layers[: len(own.layers)] = own.layers
        return
    for layer, other in zip(cache.layers, own.layers, strict=False):
        missing = (0, 0, 0, 0, 0, other.keys.shape[1] - layer.keys.shape[1])
        layer.keys, layer.values = F.pad(layer.keys, missing), F.pad(layer.values, missing)
        layer.keys[rows], layer.values[rows] = other.keys, other.values


class PathCache(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one path, in all its layers, for the sequences of a batch on which it runs.

    To the cache of the batch it is one layer more, so that it is reordered and cropped with the others.
    """

    def __init__(self, inner: DynamicCache, runs_on: Tensor) -> None:
        """`runs_on` [B]: the sequences on which the path runs."""
        super().__init__()
        self.inner, self.runs_on = inner, runs_on

    def get_seq_length(self) -> int:
        length: int = self.inner.get_seq_length()
        return length

    def crop(self, tokens_to_remove: int) -> None:
        if self.inner.get_seq_length():  # a layer that has seen nothing cannot be cropped
            self.inner.crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        self.inner.activate_past_recording()

    def batch_select_indices(self, indices: Tensor) -> None:
        """The batch becomes the sequences `indices` of this one."""
        place = self.runs_on.cumsum(0) - 1
        self.inner.batch_select_indices(place[indices[self.runs_on[indices]]])
        self.runs_on = self.runs_on[indices]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = torch.arange(len(self.runs_on), device=self.runs_on.device)
        self.batch_select_indices(batch.repeat_interleave(repeats))

    def leave(self, rows: Tensor) -> None:
        """The path no longer runs on the sequences `rows` [B]."""
        self.inner.batch_select_indices((~rows[self.runs_on]).nonzero()[:, 0])
        self.runs_on = self.runs_on & ~rows

    def join(self, rows: Tensor, joining: DynamicCache) -> None:
        """The path runs on the sequences `rows` [B] too, whose keys and values are `joining`."""
        if self.runs_on.any():
            order = torch.cat([part.nonzero()[:, 0] for part in (self.runs_on, rows)]).argsort()
            for layer, other in zip(self.inner.layers, joining.layers, strict=True):
                layer.keys = torch.cat([layer.keys, other.keys])[order]
                layer.values = torch.cat([layer.values, other.values])[order]
        else:
            self.inner = joining
        self.runs_on = self.runs_on | rows


class State(NamedTuple):
    """What a text has left behind: its tokens and positions with the gates' decisions, and a cache for each path.

    Without a cache it is forgotten after a pass, in which the paths hold no keys and values.
    """

    text: TextCache
    gates: list[GateCache]
    paths: list[PathCache]

    @classmethod
    def of(cls, cache: Any, tokens: Tensor, configs: list[ScaleConfig]) -> State:
        """The state of the text that `tokens` [B, S] continue: what `cache` holds of it, or a new one.

        configs: those of the paths, of which the base's is the first.
        """
        count = len(configs) - 1
        if cache is not None and cache.get_seq_length() > 0:
            text, *others = cache.layers
            if type(text) is not TextCache or len(others) != 2 * count + 1:
                raise ValueError(
                    "past_key_values: expected the cache of this model, with the same expansions loaded"
                )
            return cls(text, others[:count], others[count:])
        if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
            raise ValueError(
                "a model with several expansions takes a DynamicCache, or use_cache=False"
            )
        nowhere = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        paths = [PathCache(empty_like(cache, config), nowhere) for config in configs]
        paths[BASE].runs_on = ~nowhere
        state = cls(TextCache(), [GateCache() for _ in range(count)], paths)
        if cache is not None:
            cache.layers = [state.text, *state.gates, *state.paths]
        return state
