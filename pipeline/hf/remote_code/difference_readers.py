"""What a base and a trained model have each read of the same texts, and how they catch up.

Shapes: B batch, S the new tokens, T the text so far, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .scale_caches import GateCache, TextCache, empty_like, layer_of

Kept = int | Tensor
"""Of which new tokens logits are wanted: the last so many, at least one, or those at some
places."""


class TextInputs(NamedTuple):
    """A text, or the end of one: tokens and positions [B, S], and the padding mask [B, T] or
    None.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None

    def last(self, count: int) -> TextInputs:
        """The last `count` tokens."""
        first = self.tokens.shape[1] - count
        return TextInputs(self.tokens[:, first:], self.positions[:, first:], self.mask)


class TrainedKeys(DynamicLayer):  # type: ignore[misc]
    """The keys and values of a layer of the trained model, which may have read the beginning of a
    text alone, or nothing.
    """

    text: TextCache
    """The whole text, which stands in the same cache behind this layer, and so is cropped later."""

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the text's last tokens, of which some, or all, may not have been read here.

        The library's would take as many of those that were, of which a sliding window has too few.
        """
        read = self.get_seq_length()
        if read == 0:  # a layer that has seen nothing cannot be cropped
            return
        if tokens_to_remove < 0:
            tokens_to_remove += self.text.get_seq_length() - read
            if tokens_to_remove >= 0:
                return
        super().crop(tokens_to_remove)


class TrainedWindow(TrainedKeys, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The same of a layer with a sliding window."""


KNOWN_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    TrainedKeys,
    TrainedWindow,
    GateCache,
    TextCache,
}
"""The kinds of layers that a cache may have. Others may be of a server, or not grow."""


def trained_layer(like: Any, text: TextCache) -> Any:
    """An empty layer of the trained model, of the kind of `like`."""
    layer: Any
    if type(like) is DynamicLayer:
        layer = TrainedKeys()
    elif type(like) is DynamicSlidingWindowLayer:
        layer = TrainedWindow(like.sliding_window)
        if getattr(like, "record_past", False):
            layer.activate_past_recording()
    else:
        return like
    layer.text = text
    return layer


class Readers:
    """A batch of texts that is read by a base and by a trained model of the same class.

    A cache holds the layers of both, and the text itself, so that the library reorders and crops
    them together: the base's layers, the trained model's, and one TextCache.
    """

    def __init__(self, base: Any, gate_layer: int, inputs: TextInputs, cache: Any) -> None:
        """`inputs` are the new tokens; `cache` holds the text before them, or is None.

        Raises:
            ValueError: the cache is of another kind, or another model has filled it.
        """
        self.base = base
        self.gate_layer = gate_layer
        self.inputs = inputs
        self.cache = cache
        self.whole = inputs
        if cache is None:
            return
        self._prepare(cache)
        earlier: TextCache = layer_of(TextCache, cache.layers)
        _check_filled_here(cache, earlier)
        if earlier.get_seq_length() > 0:
            tokens, positions = earlier.keys[:, 0].unbind(-1)
            self.whole = TextInputs(
                torch.cat([tokens, inputs.tokens], dim=1),
                torch.cat([positions, inputs.positions], dim=1),
                inputs.mask,
            )

    def _prepare(self, cache: Any) -> None:
        """Gives an empty cache the layers of both models."""
        config = self.base.config
        if not {type(layer) for layer in cache.layers} <= KNOWN_LAYERS or cache.offloading:
            raise ValueError(
                "past_key_values: expected a DynamicCache in the memory of the model: two models "
                "read a text, each at its own time"
            )
        if not cache.layers:
            cache.layers = DynamicCache(config=config).layers
        if len(cache.layers) == config.num_hidden_layers:
            text = TextCache()
            for layer in empty_like(cache, config).layers:
                cache.layers.append(trained_layer(layer, text))
            cache.layers.append(text)

    def remember(self, opens: Tensor) -> None:
        """Keeps the new tokens, and for which of them the gate opens: bool [B, S, 1]."""
        if self.cache is None:
            return
        text = torch.stack([self.inputs.tokens, self.inputs.positions], dim=-1)
        layer_of(TextCache, self.cache.layers).update(text.unsqueeze(1), opens.unsqueeze(1))

    def read_by_base(self, kept: Kept) -> tuple[Tensor | None, Tensor]:
        """The base's logits [B, K, V] of the new tokens that are kept, and its stream before the
        gate [B, S, D].

        Where the gate was open for all texts at the token before, the layers below it read alone,
        and the logits are None: most likely nothing needs them.
        """
        if self._stays_open():
            lower = _lower_layers(self.base.base_model, self.gate_layer)
            read = lower(
                input_ids=self.inputs.tokens,
                attention_mask=self.inputs.mask,
                position_ids=self.inputs.positions,
                past_key_values=self._layers(first=0),
                use_cache=True,
            )
            return None, read.last_hidden_state
        with _stream_before(self.base.base_model, self.gate_layer) as found:
            logits = self.base_logits(kept)
        return logits, found[0][:, -self.inputs.tokens.shape[1] :]

    def base_logits(self, kept: Kept) -> Tensor:
        """The base's logits of the new tokens that are kept: [B, K, V]."""
        return self._read(self.base, self._layers(first=0), kept)

    def trained_logits(self, model: Any, kept: Kept) -> Tensor:
        """The trained model's logits of the new tokens that are kept: [B, K, V]."""
        return self._read(model, self._layers(first=self.base.config.num_hidden_layers), kept)

    def _stays_open(self) -> bool:
        """Whether the base's layers above the gate may wait for a token that is closed."""
        if self.cache is None or self.gate_layer >= self.base.config.num_hidden_layers:
            return False
        # Sliding windows drop what a reader that catches up would attend to.
        of_base = self.cache.layers[: self.base.config.num_hidden_layers]
        if not all(type(layer) is DynamicLayer for layer in of_base):
            return False
        text: TextCache = layer_of(TextCache, self.cache.layers)
        return text.get_seq_length() > 0 and bool(text.values[:, 0, -1].all())

    def _layers(self, first: int) -> Any:
        """One model's layers of the cache, from index `first` on, as a cache; None if there is
        none.
        """
        if self.cache is None:
            return None
        view = DynamicCache()
        view.layers = self.cache.layers[first : first + self.base.config.num_hidden_layers]
        return view

    def _read(self, model: Any, layers: Any, kept: Kept) -> Tensor:
        """Lets a model read what it has not read of the text; the logits of the new tokens that are
        kept.
        """
        text = self.inputs
        if layers is not None:
            already_read = layers.layers[-1].get_seq_length()
            text = self.whole.last(self.whole.tokens.shape[1] - already_read)
            for layer in layers.layers:
                # The layers below the gate read ahead: they read again with the others.
                if layer.get_seq_length() > already_read:
                    layer.keys = layer.keys[:, :, :already_read]
                    layer.values = layer.values[:, :, :already_read]
        if isinstance(kept, Tensor):
            kept = kept + text.tokens.shape[1] - self.inputs.tokens.shape[1]
        logits: Tensor = model(
            input_ids=text.tokens,
            attention_mask=text.mask,
            position_ids=text.positions,
            past_key_values=layers,
            use_cache=layers is not None,
            logits_to_keep=kept,
        ).logits
        return logits


def _check_filled_here(cache: Any, text: TextCache) -> None:
    """Checks that `text` holds all tokens that were read into `cache`.

    Layers may have read less than it: they catch up.

    Raises:
        ValueError: it does not.
    """
    known = text.get_seq_length()
    for layer in cache.layers:
        if type(layer) is GateCache:  # of the last tokens alone
            continue
        if layer.get_seq_length() > known:
            raise ValueError(
                "past_key_values: filled by another model, such as the base alone; give the text "
                "from its start"
            )


@contextmanager
def _stream_before(decoder: Any, layer: int) -> Iterator[list[Tensor]]:
    """Collects the streams [B, S, D] that enter a layer of `decoder`, or its last norm."""
    found: list[Tensor] = []
    module = _last_norm(decoder)[1] if layer == len(decoder.layers) else decoder.layers[layer]

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0])

    handle = module.register_forward_pre_hook(collect)
    try:
        yield found
    finally:
        handle.remove()


def _last_norm(decoder: Any) -> tuple[str, nn.Module]:
    """The norm after the last layer, and what its decoder calls it."""
    for name in ("norm", "final_layer_norm"):  # GPT-NeoX has the second
        if hasattr(decoder, name):
            return name, getattr(decoder, name)
    raise ValueError(f"{type(decoder).__name__}: expected a norm after the last layer")


def _lower_layers(decoder: Any, count: int) -> Any:
    """A decoder of the first `count` layers of `decoder`, without its last norm. It shares all
    modules, and is made anew where it is needed.
    """
    lower = copy.copy(decoder)
    lower._modules = dict(decoder._modules)
    lower.config = copy.copy(decoder.config)
    lower.config.num_hidden_layers = count
    lower.layers = nn.ModuleList(decoder.layers[:count])
    name, _ = _last_norm(decoder)
    setattr(lower, name, nn.Identity())
    return lower
