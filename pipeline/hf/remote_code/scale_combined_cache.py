"""What a text leaves behind in a model with several expansions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .configuration_scale import ScaleConfig
from .scale_caches import GateCache, TextCache, empty_like

BASE = 0
"""The index of the base among the paths; expansions follow, from 1 on."""


class PathCache(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one path, in all its layers, for the sequences of a batch on which it
    runs.

    To the cache of the batch it is one layer more, so that it is reordered and cropped with the
    others.
    """

    def __init__(self, inner: DynamicCache, runs_on: Tensor) -> None:
        """`runs_on` [B]: the sequences on which the path runs."""
        super().__init__()
        self.inner = inner
        self.runs_on = runs_on

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
        # `inner` has rows for the sequences on which the path runs alone.
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
            # The rows of both, one after the other, brought into the order of the batch.
            present = self.runs_on.nonzero()[:, 0]
            added = rows.nonzero()[:, 0]
            order = torch.cat([present, added]).argsort()
            for layer, other in zip(self.inner.layers, joining.layers, strict=True):
                layer.keys = torch.cat([layer.keys, other.keys])[order]
                layer.values = torch.cat([layer.values, other.values])[order]
        else:
            self.inner = joining
        self.runs_on = self.runs_on | rows


class CombinedState(NamedTuple):
    """What a text has left behind: its tokens and positions with the gates' decisions, and a cache
    for each path.

    Without a cache it is forgotten after a pass, in which the paths hold no keys and values.
    """

    text: TextCache
    gates: list[GateCache]
    paths: list[PathCache]

    @classmethod
    def of(cls, cache: Any, tokens: Tensor, configs: list[ScaleConfig]) -> CombinedState:
        """The state of the text that `tokens` [B, S] continue: what `cache` holds of it, or a new
        one.

        Args:
            cache: the argument `past_key_values`; a new state becomes its layers.
            tokens: the tokens of this pass.
            configs: those of the paths, of which the base's is the first.

        Raises:
            ValueError: `cache` is of another model, or of a kind that this one does not take.
        """
        expansions = len(configs) - 1
        if cache is not None and cache.get_seq_length() > 0:
            text, *others = cache.layers
            if type(text) is not TextCache or len(others) != 2 * expansions + 1:
                raise ValueError(
                    "past_key_values: expected the cache of this model, with the same expansions "
                    "loaded"
                )
            return cls(text, others[:expansions], others[expansions:])
        if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
            raise ValueError(
                "a model with several expansions takes a DynamicCache, or use_cache=False"
            )
        nowhere = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        paths = [PathCache(empty_like(cache, config), nowhere) for config in configs]
        paths[BASE].runs_on = ~nowhere
        gates = [GateCache() for _ in range(expansions)]
        state = cls(TextCache(), gates, paths)
        if cache is not None:
            cache.layers = [state.text, *state.gates, *state.paths]
        return state
