"""The paths of a pass through the layers: what the two streams do, for each way to run a model.

Every path is a function that takes the layers of a pass and the streams that enter the first of
them. All paths run layer by layer, so that ZeRO-3 gathers each layer once however many streams pass
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.model.attention import Documents
from pipeline.model.decoder_layer import Context, DecoderLayer
from pipeline.model.open_weights import OwnInput
from pipeline.model.spec import LayerKind
from pipeline.open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens
from pipeline.scale.widened_linear import Streams


class TokenBatch(NamedTuple):
    """The tokens of a batch and their positions, [B, S], and where documents lie; None as in
    `Decoder.forward`."""

    tokens: Tensor
    positions: Tensor | None
    documents: Documents | None

    def first_sequences(self, count: int) -> TokenBatch:
        """The first `count` sequences."""
        positions = self.positions
        documents = self.documents
        if positions is not None:
            positions = positions[:count]
        if documents is not None:
            documents = documents.first_rows(count)
        return TokenBatch(self.tokens[:count], positions, documents)


@dataclass(frozen=True)
class LayerPass:
    """Layers with what a pass through them needs.

    Attributes:
        layers: the layers to run, in their order; all of a decoder's, or a run of them.
        contexts: by kind of layer, its rotary table and attention kernel for the batch.
        is_recomputed: whether the backward pass computes a layer again instead of keeping its
            activations.
        recomputed: runs such a layer with its arguments; `pipeline.model.recomputation`.
        own_input: what open tokens add to x before one of the layers; None: nothing.
    """

    layers: Sequence[DecoderLayer]
    contexts: dict[LayerKind, Context]
    is_recomputed: Callable[[DecoderLayer], bool]
    recomputed: Callable[..., Streams]
    own_input: OwnInput | None = None

    def part(self, first: int | None, stop: int | None) -> LayerPass:
        """The layers from index `first` on and before `stop`."""
        return replace(self, layers=self.layers[first:stop])

    def run(
        self, layer: DecoderLayer, streams: Streams, *, open_tokens: OpenTokens = ALL_OPEN
    ) -> Streams:
        """One layer. x: [B, S, D], x_up: [B, S, U] -> the same shapes; `open_tokens` as in
        `DecoderLayer`."""
        x, x_up = streams
        if self.own_input is not None and self.own_input.layer is layer:
            x = self.own_input.added_to(x, open_tokens)
        result: Streams
        context = self.contexts[layer.kind]
        if torch.is_grad_enabled() and self.is_recomputed(layer):
            result = self.recomputed(layer, x, x_up, context, open_tokens)
        else:
            result = layer(x, x_up, context, open_tokens)
        return result


def run_widened(layers: LayerPass, streams: Streams) -> Streams:
    """The whole model: both streams through every block of every layer.

    This is the path of Preserve and Adapt, of the baselines, and of a base alone, which has no
    x_up. Every token is open.
    """
    for layer in layers.layers:
        streams = layers.run(layer, streams)
    return streams


def run_preserved(layers: LayerPass, streams: Streams) -> Streams:
    """Both streams without W12: the base stream is the base model's, and the expansion stream reads
    it.

    Adapters and added layers are left out too.
    """
    for layer in layers.layers:
        streams = layers.run(layer, streams, open_tokens=NONE_OPEN)
    return streams


def run_base(layers: LayerPass, x: Tensor) -> Tensor:
    """The base model alone, without an expansion stream. x: [B, S, D] -> [B, S, D]."""
    x, _ = run_preserved(layers, (x, None))
    return x


def run_routed(layers: LayerPass, adapted: Streams, preserved: Streams) -> tuple[Streams, Streams]:
    """Route: the adapted and the preserved path. They are one below the first layer with W12."""
    for layer in layers.layers:
        if layer.collaborative:
            preserved = layers.run(layer, preserved, open_tokens=NONE_OPEN)
            adapted = layers.run(layer, adapted)
        else:
            adapted = preserved = layers.run(layer, adapted)
    return adapted, preserved
