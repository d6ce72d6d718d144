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
from pipeline.model.spec import LayerKind
from pipeline.scale.widened_linear import Streams
from pipeline.scale_math import masked_sum


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
    """

    layers: Sequence[DecoderLayer]
    contexts: dict[LayerKind, Context]
    is_recomputed: Callable[[DecoderLayer], bool]
    recomputed: Callable[..., Streams]

    def part(self, first: int | None, stop: int | None) -> LayerPass:
        """The layers from index `first` on and before `stop`."""
        return replace(self, layers=self.layers[first:stop])

    def run(
        self, layer: DecoderLayer, streams: Streams, *, masked: bool | Tensor = False
    ) -> Streams:
        """One layer. x: [B, S, D], x_up: [B, S, U] -> the same shapes; `masked` as in
        `DecoderLayer`."""
        result: Streams
        context = self.contexts[layer.kind]
        if torch.is_grad_enabled() and self.is_recomputed(layer):
            result = self.recomputed(layer, *streams, context, masked)
        else:
            result = layer(*streams, context, masked)
        return result


@dataclass(frozen=True)
class OwnInput:
    """What open tokens add to x where their own weights begin (`pipeline.model.own_weights`).

    Attributes:
        layer: the layer that x is about to enter.
        difference: [B, S, D]; with sequence parallelism this rank's positions, as x.
    """

    layer: int
    difference: Tensor

    def added_to(self, streams: Streams, *, masked: bool | Tensor = False) -> Streams:
        """The streams with the difference in x, but for the tokens of a mask."""
        x, x_up = streams
        return masked_sum(x, self.difference, masked), x_up


def run_widened(layers: LayerPass, streams: Streams) -> Streams:
    """The whole model: both streams through every block of every layer.

    This is the path of Preserve and Adapt, of the baselines, and of a base alone, which has no
    x_up.
    """
    for layer in layers.layers:
        streams = layers.run(layer, streams)
    return streams


def run_open(layers: LayerPass, streams: Streams, own: OwnInput) -> Streams:
    """The whole model where every token is open, with own input rows."""
    streams = run_widened(layers.part(None, own.layer), streams)
    streams = own.added_to(streams)
    return run_widened(layers.part(own.layer, None), streams)


def run_preserved(layers: LayerPass, streams: Streams) -> Streams:
    """Both streams without W12: the base stream is the base model's, and the expansion stream reads
    it.

    Adapters and added layers are masked too.
    """
    for layer in layers.layers:
        streams = layers.run(layer, streams, masked=True)
    return streams


def run_base(layers: LayerPass, x: Tensor) -> Tensor:
    """The base model alone, without an expansion stream. x: [B, S, D] -> [B, S, D]."""
    x, _ = run_preserved(layers, (x, None))
    return x


def run_routed(layers: LayerPass, adapted: Streams, preserved: Streams) -> tuple[Streams, Streams]:
    """Route: the adapted and the preserved path. They are one below the first layer with W12."""
    for layer in layers.layers:
        if layer.collaborative:
            preserved = layers.run(layer, preserved, masked=True)
            adapted = layers.run(layer, adapted)
        else:
            adapted = preserved = layers.run(layer, adapted)
    return adapted, preserved
